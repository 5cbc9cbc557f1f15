"""Unconditional image generation with diffusers and accelerate, on 8x8 digits."""

import sys

import kairostep as ks
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from kairostep.integrations.accelerate import Accelerated
from kairostep.integrations.diffusers import Scheduled
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

max_train_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
prediction_type = sys.argv[2] if len(sys.argv) > 2 else "epsilon"  # or "sample"
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
train_dataloader = DataLoader(images, batch_size=32, shuffle=True, drop_last=True)
noise_scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type=prediction_type)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=max_train_steps)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
timestep_sampler = Accelerated(Scheduled(ks.RootLoss(), noise_scheduler, snr_weighted=True), accelerator)

global_step = 0
while global_step < max_train_steps:
    for clean_images in train_dataloader:
        noise = torch.randn_like(clean_images)
        drawn = timestep_sampler.sample(clean_images)
        timesteps = drawn.timesteps
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        with accelerator.accumulate(model):
            model_output = model(noisy_images, timesteps).sample
            if prediction_type == "epsilon":
                loss = F.mse_loss(model_output.float(), noise.float(), reduction="none")
            else:
                alpha_t = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps].view(-1, 1, 1, 1)
                snr_weights = alpha_t / (1 - alpha_t)
                loss = snr_weights * F.mse_loss(model_output.float(), clean_images.float(), reduction="none")
            losses = loss.mean(dim=[1, 2, 3])
            loss = (losses * drawn.weight).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            with timestep_sampler.observe(clean_images, drawn, losses):
                optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            global_step += 1
            if global_step % 50 == 0 or global_step == max_train_steps:
                accelerator.print(f"step {global_step}: loss {loss.detach().item():.4f}")
        if global_step >= max_train_steps:
            break
