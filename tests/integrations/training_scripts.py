"""Short training scripts with the shapes of diffusers' own, that run: a linear model, rows of random data."""

HEAD = """import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from packaging import version
from tqdm.auto import tqdm

import diffusers
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
IMPORTS

def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description="Ein Lernprogramm, kurz: ü.")
    parser.add_argument("--output_dir", type=str, default="out")
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
    )

    args = parser.parse_args(input_args)
    args.__dict__.update(SETTINGS)
    return args


SETTINGS = {}
LOSSES, DRAWN = [], []


def main(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(args.seed or 0)
    noise_scheduler = SCHEDULER
    data = torch.randn(64, 4, 2, 2)
    model = torch.nn.Conv2d(4, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    # Prepare everything.
    if args.train_text_encoder:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    global_step = 0

    if args.resume_from_checkpoint:
        accelerator.load_state(os.path.join(args.output_dir, args.resume_from_checkpoint))
        global_step = int(args.resume_from_checkpoint.split("-")[1])

    for epoch in range(1):
        for step in tqdm(range(global_step, args.max_train_steps), disable=True):
            with accelerator.accumulate(model):
                torch.manual_seed(step)
                latents = data[torch.randperm(64)[:8]]
                noise = torch.randn_like(latents)
                bsz = latents.shape[0]
"""
TAIL = """                DRAWN.append(timesteps)
                avg_loss = accelerator.gather(loss.repeat(8)).mean()
                LOSSES.append(avg_loss.item())

                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{step + 1}"))


if __name__ == "__main__":
    args = parse_args()
    main(args)
"""
RANDINT = """                # Sample a random timestep for each image
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)
                timesteps = timesteps.long()
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
                model_pred = model(noisy_latents)
                if noise_scheduler.config.prediction_type == "epsilon":
                    target = noise
                elif noise_scheduler.config.prediction_type == "v_prediction":
                    target = noise_scheduler.get_velocity(latents, noise, timesteps)
                else:
                    raise ValueError(f"Unknown prediction type {noise_scheduler.config.prediction_type}")
"""
RAND = """                shares = torch.rand((3,))
                timesteps = torch.rand((bsz,), device=latents.device)
                timesteps = ((1 - timesteps**3) * noise_scheduler.config.num_train_timesteps).long()
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
                model_pred = model(noisy_latents)
                target = noise
"""
FLOW = """                u = compute_density_for_timestep_sampling(
                    weighting_scheme=args.weighting_scheme,
                    batch_size=bsz,
                    logit_mean=args.logit_mean,
                    logit_std=args.logit_std,
                    mode_scale=args.mode_scale,
                )
                indices = (u * noise_scheduler.config.num_train_timesteps).long()
                timesteps = noise_scheduler.timesteps[indices].to(device=latents.device)
                sigmas = noise_scheduler.sigmas[indices].view(-1, 1, 1, 1)
                noisy_latents = (1.0 - sigmas) * latents + sigmas * noise
                model_pred = model(noisy_latents)
                weighting = compute_loss_weighting_for_sd3(weighting_scheme=args.weighting_scheme, sigmas=sigmas)
                target = noise - latents
"""
MSE = """                loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
"""
BARE_MSE = """                loss = F.mse_loss(model_pred, target)
"""
SNR = """                if args.snr_gamma is None:
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                else:
                    snr = compute_snr(noise_scheduler, timesteps)
                    mse_loss_weights = torch.stack([snr, args.snr_gamma * torch.ones_like(timesteps)], dim=1).min(
                        dim=1
                    )[0]
                    if noise_scheduler.config.prediction_type == "epsilon":
                        mse_loss_weights = mse_loss_weights / snr
                    elif noise_scheduler.config.prediction_type == "v_prediction":
                        mse_loss_weights = mse_loss_weights / (snr + 1)

                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")
                    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * mse_loss_weights
                    loss = loss.mean()
"""
PRIOR = """                if args.with_prior_preservation:
                    model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
                    target, target_prior = torch.chunk(target, 2, dim=0)
                    prior_loss = F.mse_loss(model_pred_prior.float(), target_prior.float(), reduction="mean")
                loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                if args.with_prior_preservation:
                    loss = loss + args.prior_loss_weight * prior_loss
"""
MASK = """                mask = (latents > 0).float()
                loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")
                loss = ((loss * mask).sum([1, 2, 3]) / mask.sum([1, 2, 3])).mean()
"""
FLOW_LOSS = """                loss = torch.mean(
                    (weighting.float() * (model_pred.float() - target.float()) ** 2).reshape(target.shape[0], -1),
                    1,
                )
                loss = loss.mean()
"""
FLOW_IMPORT = """from diffusers.training_utils import (
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)
"""
DDPM = 'DDPMScheduler(prediction_type=args.prediction_type, beta_schedule="scaled_linear")'
SETTINGS = {
    "max_train_steps": 6,
    "checkpointing_steps": 100,
    "resume_from_checkpoint": None,
    "train_text_encoder": False,
    "with_prior_preservation": True,
    "prior_loss_weight": 0.5,
    "snr_gamma": 5.0,
    "prediction_type": "epsilon",
    "weighting_scheme": "logit_normal",
    "logit_mean": 0.5,
    "logit_std": 0.8,
    "mode_scale": 1.29,
}


def script(draw: str, loss: str) -> str:
    """Return a script that draws and reduces in one of diffusers' ways."""
    is_flow = draw == FLOW
    imports = FLOW_IMPORT if is_flow else "from diffusers.training_utils import compute_snr\n"
    scheduler = "FlowMatchEulerDiscreteScheduler(shift=3.0)" if is_flow else DDPM
    return HEAD.replace("IMPORTS", imports).replace("SCHEDULER", scheduler) + draw + loss + TAIL


SCRIPTS = {
    "mse": script(RANDINT, MSE),
    "bare_mse": script(RANDINT, BARE_MSE),
    "snr": script(RANDINT, SNR),
    "prior": script(RANDINT, PRIOR),
    "mask": script(RANDINT, MASK),
    "rand": script(RAND, MSE),
    "flow": script(FLOW, FLOW_LOSS),
}
