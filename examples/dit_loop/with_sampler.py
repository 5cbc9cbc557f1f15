"""DiT's training loop in small: a DiT on 8x8 digits, its loss from an OpenAI-style GaussianDiffusion."""

import sys

import kairostep as ks
import torch
from diffusers import DiTTransformer2DModel
from kairostep.integrations.openai import ScheduleSampler
from sklearn.datasets import load_digits

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
torch.manual_seed(0)
digits = load_digits()
data = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
classes = torch.tensor(digits.target)


class GaussianDiffusion:
    """DiT's diffusion, as far as training goes."""

    def __init__(self, num_timesteps):
        self.num_timesteps = num_timesteps
        self.betas = torch.linspace(1e-4, 0.02, num_timesteps)
        self.alphas_cumprod = (1 - self.betas).cumprod(0)

    def training_losses(self, model, x_start, t, model_kwargs):
        """Return the losses of each sample by name."""
        noise = torch.randn_like(x_start)
        alpha_bar = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        x_t = alpha_bar.sqrt() * x_start + (1 - alpha_bar).sqrt() * noise
        return {"loss": (model(x_t, t, **model_kwargs).sample - noise).square().mean(dim=(1, 2, 3))}


model = DiTTransformer2DModel(
    sample_size=8, in_channels=1, patch_size=2, num_layers=2, num_attention_heads=2, attention_head_dim=16
)
diffusion = GaussianDiffusion(1000)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule_sampler = ScheduleSampler(ks.RootLoss(), diffusion)

for step in range(STEPS):
    rows = torch.randint(len(data), (64,))
    x, y = data[rows], classes[rows]
    t, weights = schedule_sampler.sample(x.shape[0], x.device)
    loss_dict = diffusion.training_losses(model, x, t, {"class_labels": y})
    schedule_sampler.update_with_local_losses(t, loss_dict["loss"])
    loss = (loss_dict["loss"] * weights).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (step + 1) % 100 == 0 or step + 1 == STEPS:
        print(f"step {step + 1}: loss {loss:.4f}")

checkpoint = {
    "model": model.state_dict(),
    "opt": opt.state_dict(),
    "schedule_sampler": schedule_sampler.state_dict(),
}
torch.save(checkpoint, f"{STEPS:07d}.pt")
