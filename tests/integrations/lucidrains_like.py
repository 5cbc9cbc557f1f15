"""A GaussianDiffusion as denoising-diffusion-pytorch 2.3.4 has it, as far as a loop sees it, and a small network."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

T = 20
STAND_INS = ("torchvision", "pytorch_fid")


class GaussianDiffusion(nn.Module):
    """Theirs, as far as a loop sees it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        timesteps: int = T,
        objective: str = "pred_v",
        min_snr_loss_weight: bool = False,
        min_snr_gamma: float = 5,
        offset_noise_strength: float = 0.0,
        immiscible: bool = False,
        **shape: Any,
    ) -> None:
        super().__init__()
        self.model, self.objective, self.num_timesteps = model, objective, timesteps
        self.self_condition = getattr(model, "self_condition", False)
        self.offset_noise_strength, self.immiscible = offset_noise_strength, immiscible
        betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64) * 500 / timesteps
        alphas_cumprod = (1 - betas).cumprod(0)
        snr = alphas_cumprod / (1 - alphas_cumprod)
        clipped = snr.clamp(max=min_snr_gamma) if min_snr_loss_weight else snr
        weight = {"pred_noise": clipped / snr, "pred_x0": clipped, "pred_v": clipped / (snr + 1)}[objective]
        for name, value in (("betas", betas), ("alphas_cumprod", alphas_cumprod), ("loss_weight", weight)):
            self.register_buffer(name, value.float())

    def random_times(self, batch_size: int) -> Tensor:
        """Return uniform steps."""
        return torch.randint(0, self.num_timesteps, (batch_size,))

    def p_losses(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        """Return the mean loss or, with "none", that of each sample."""
        noise = torch.randn_like(x_start) if noise is None else noise
        alpha_bar = self.alphas_cumprod[t].view(-1, *[1] * (x_start.ndim - 1))
        alpha, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        x = alpha * x_start + sigma * noise
        x_self_cond = x if self.self_condition and random.random() < 0.5 else None
        output = self.model(x, t, x_self_cond)
        target = {"pred_noise": noise, "pred_x0": x_start, "pred_v": alpha * noise - sigma * x_start}[self.objective]
        loss = F.mse_loss(output, target, reduction="none").flatten(1).mean(1) * self.loss_weight[t]
        return loss if loss_reduction == "none" else loss.mean()

    def forward(
        self, img: Tensor, *args: Any, times: Tensor | None = None, loss_reduction: str = "mean", **kwargs: Any
    ) -> Tensor:
        """Return the loss of images in [0, 1]."""
        times = self.random_times(len(img)) if times is None else times
        return self.p_losses(img * 2 - 1, times, *args, loss_reduction=loss_reduction, **kwargs)


class Network(nn.Module):
    """A network with the attributes that they ask for."""

    channels = out_dim = 1
    self_condition = False

    def __init__(self, *, self_condition: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.self_condition = self_condition
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, x_self_cond: Tensor | None = None) -> Tensor:
        """Return a prediction."""
        level = (t / T).view(-1, 1, 1, 1).expand_as(x)
        return self.layers(torch.cat([x if x_self_cond is None else x + x_self_cond, level], 1))
