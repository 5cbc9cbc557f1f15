"""A script of the shape that home-made ones have: a dataclass of settings, a function with the loop, no argparse."""

HEAD = """from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, notebook_launcher
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from tqdm.auto import tqdm


@dataclass
class TrainingConfig:
    image_size: int = 4
    train_batch_size: int = 8
    num_epochs: int = 2
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lr_warmup_steps: int = 1
    save_model_epochs: int = 1000
    save_state_epochs: int = 110
    mixed_precision: str = "no"
    output_dir: str = "spots"
    resume_from: str = ""
    seed: int = 0


"""
LOOP = """def train_loop(config, model, noise_scheduler, optimizer, train_dataloader, lr_scheduler):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    if accelerator.is_main_process and config.output_dir is not None:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)

    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    global_step = 0

    for epoch in range(config.num_epochs):
        progress_bar = tqdm(total=len(train_dataloader), disable=True)
        progress_bar.set_description(f"Epoch {epoch}")
        for step, batch in enumerate(train_dataloader):
            clean_images = batch["images"]
            noise = torch.randn(clean_images.shape, device=clean_images.device)
            bs = clean_images.shape[0]
            # How noisy each image gets
            timesteps = torch.randint(
                0, noise_scheduler.config.num_train_timesteps, (bs,), device=clean_images.device, dtype=torch.int64
            )
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)

            with accelerator.accumulate(model):
                noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
                loss = F.mse_loss(noise_pred, noise)
                accelerator.backward(loss)

                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            progress_bar.update(1)
            DRAWN.append(timesteps)
            LOSSES.append(loss.detach().item())
            global_step += 1

        if accelerator.is_main_process:
            pipeline = DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noise_scheduler)
            if (epoch + 1) % config.save_model_epochs == 0:
                pipeline.save_pretrained(config.output_dir)


"""
SETUP = """DRAWN, LOSSES = [], []
config = TrainingConfig(**SETTINGS)
torch.manual_seed(config.seed)
images = [{"images": image} for image in torch.rand(8, 1, config.image_size, config.image_size) * 2 - 1]
train_dataloader = torch.utils.data.DataLoader(images, batch_size=config.train_batch_size, shuffle=True)
model = UNet2DModel(
    sample_size=config.image_size,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8,),
    norm_num_groups=4,
    down_block_types=("DownBlock2D",),
    up_block_types=("UpBlock2D",),
)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
lr_scheduler = get_cosine_schedule_with_warmup(
    optimizer=optimizer,
    num_warmup_steps=config.lr_warmup_steps,
    num_training_steps=len(train_dataloader) * config.num_epochs,
)
"""
LAUNCH = """args = (config, model, noise_scheduler, optimizer, train_dataloader, lr_scheduler)
notebook_launcher(train_loop, args, num_processes=1)
"""
CALL = "train_loop(config, model, noise_scheduler, optimizer, train_dataloader, lr_scheduler)\n"
TUTORIAL = HEAD + LOOP + SETUP + LAUNCH

# With checkpoints, at which a run may begin
RESUMABLE = (
    TUTORIAL.replace(
        "    global_step = 0\n",
        """    first_epoch = 0
    if config.resume_from:
        accelerator.load_state(config.resume_from)
        first_epoch = int(config.resume_from.split("-")[-1])
    global_step = first_epoch * len(train_dataloader)
""",
    )
    .replace(
        "range(config.num_epochs):\n", "range(first_epoch, config.num_epochs):\n        torch.manual_seed(epoch)\n", 1
    )
    .replace(
        "\n\nDRAWN,",
        """        if (epoch + 1) % config.save_state_epochs == 0:
            accelerator.save_state(f"{config.output_dir}/state-{epoch + 1}")


DRAWN,""",
    )
)
PARSER = """import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=1e-3)
"""
