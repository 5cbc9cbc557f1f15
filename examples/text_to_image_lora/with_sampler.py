"""LoRA fine-tuning of a text-to-image model with diffusers, transformers and peft: small parts, random weights."""

import sys

import kairostep as ks
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from kairostep.integrations.accelerate import Accelerated
from kairostep.integrations.diffusers import Scheduled
from peft import LoraConfig
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from transformers import CLIPTextConfig, CLIPTextModel

max_train_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
torch.manual_seed(0)
accelerator = Accelerator()
noise_scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
text_config = CLIPTextConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=0,
    eos_token_id=2,
)
text_encoder = CLIPTextModel(text_config).to(accelerator.device)
vae = AutoencoderKL(block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4).to(accelerator.device)
unet = UNet2DConditionModel(
    sample_size=16,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=4,
    norm_num_groups=8,
)
for frozen in (text_encoder, vae, unet):
    frozen.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
lora_layers = [parameter for parameter in unet.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(lora_layers, lr=1e-3)
train_dataset = TensorDataset(torch.rand(64, 3, 32, 32) * 2 - 1, torch.randint(3, 100, (64, 16)))  # images, captions
sampled_rows = RandomSampler(train_dataset, num_samples=16 * max_train_steps)
train_dataloader = DataLoader(train_dataset, batch_size=16, sampler=sampled_rows)
unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)
timestep_sampler = Accelerated(Scheduled(ks.RootLoss(), noise_scheduler), accelerator)

for global_step, (pixel_values, input_ids) in enumerate(train_dataloader, start=1):
    latents = vae.encode(pixel_values).latent_dist.sample() * vae.config.scaling_factor
    noise = torch.randn_like(latents)
    drawn = timestep_sampler.sample(latents)
    timesteps = drawn.timesteps
    noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
    model_pred = unet(noisy_latents, timesteps, text_encoder(input_ids, return_dict=False)[0]).sample
    losses = F.mse_loss(model_pred.float(), noise.float(), reduction="none").mean(dim=[1, 2, 3])
    loss = (losses * drawn.weight).mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(lora_layers, 1.0)
    with timestep_sampler.observe(latents, drawn, losses):
        optimizer.step()
    optimizer.zero_grad()
    if global_step % 50 == 0 or global_step == max_train_steps:
        accelerator.print(f"step {global_step}: loss {loss.detach().item():.4f}")
