"""LoRA fine-tuning of an SDXL-shaped model with diffusers, transformers and peft: small parts, random weights."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from kairostep.integrations.diffusers_scripts import ScriptSampler
from peft import LoraConfig
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("max_train_steps", type=int, nargs="?", default=100)
parser.add_argument("--output_dir", default="sdxl-lora")
parser.add_argument("--resume_from_checkpoint", help="such as checkpoint-50, a folder in --output_dir")
parser.add_argument("--checkpointing_steps", type=int, default=50)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--snr_gamma", type=float, default=None)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--timestep_sampler", default="root_loss", help="uniform has the script's density")
args = parser.parse_args()

set_seed(args.seed)
accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
noise_scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
text = {"vocab_size": 100, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
text |= {"bos_token_id": 0, "eos_token_id": 2, "projection_dim": 32}
text_encoder_one = CLIPTextModel(CLIPTextConfig(hidden_size=16, **text)).to(accelerator.device)
text_encoder_two = CLIPTextModelWithProjection(CLIPTextConfig(hidden_size=32, **text)).to(accelerator.device)
vae = AutoencoderKL(block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4).to(accelerator.device)
unet = UNet2DConditionModel(
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=16 + 32,
    attention_head_dim=4,
    norm_num_groups=8,
    addition_embed_type="text_time",  # pooled embedding of the second encoder, and six numbers of size and crop
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=32 + 6 * 8,
)
for frozen in (text_encoder_one, text_encoder_two, vae, unet):
    frozen.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
lora_parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(lora_parameters, lr=1e-3)
train_dataset = TensorDataset(torch.rand(64, 3, 32, 32) * 2 - 1, torch.randint(3, 100, (64, 16)))  # images, captions
train_dataloader = DataLoader(train_dataset, batch_size=4, shuffle=True)
unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)
timestep_sampler = ScriptSampler(args.timestep_sampler, accelerator, seed=args.seed)

global_step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(str(Path(args.output_dir, args.resume_from_checkpoint)))
    global_step = int(args.resume_from_checkpoint.split("-")[1])

while global_step < args.max_train_steps:
    for pixel_values, input_ids in train_dataloader:
        with accelerator.accumulate(unet):
            latents = vae.encode(pixel_values).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            bsz = latents.shape[0]
            timesteps = timestep_sampler.randint(
                0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device
            )
            noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
            first = text_encoder_one(input_ids, output_hidden_states=True).hidden_states[-2]
            second = text_encoder_two(input_ids, output_hidden_states=True)
            prompt_embeds = torch.cat([first, second.hidden_states[-2]], dim=-1)
            add_time_ids = torch.tensor([[32, 32, 0, 0, 32, 32]], device=latents.device).repeat(bsz, 1)
            added = {"text_embeds": second.text_embeds, "time_ids": add_time_ids}
            model_pred = unet(noisy_latents, timesteps, prompt_embeds, added_cond_kwargs=added).sample
            if args.snr_gamma is None:
                loss = timestep_sampler.mean(F.mse_loss(model_pred.float(), noise.float(), reduction="none"))
            else:
                snr = compute_snr(noise_scheduler, timesteps)
                mse_loss_weights = snr.clamp(max=args.snr_gamma) / snr
                loss = F.mse_loss(model_pred.float(), noise.float(), reduction="none")
                loss = loss.mean(dim=[1, 2, 3]) * mse_loss_weights
                loss = timestep_sampler.mean(loss, mse_loss_weights)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(lora_parameters, 1.0)
            with timestep_sampler.observe():
                optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        global_step += 1
        if global_step % args.checkpointing_steps == 0:
            accelerator.save_state(str(Path(args.output_dir, f"checkpoint-{global_step}")))
        if global_step % 50 == 0 or global_step == args.max_train_steps:
            accelerator.print(f"step {global_step}: loss {loss.detach().item():.4f}")
        if global_step == args.max_train_steps:
            break
