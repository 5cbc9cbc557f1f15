"""Losses of every process and prediction, row by row in plain numbers."""

import math

import torch

import kairostep as ks

PROCESSES = {"discrete": ks.DiscreteProcess.cosine(), "flow": ks.FlowProcess(), "edm": ks.EDMProcess(0.6)}
PREDICTIONS = {
    "epsilon": ks.EPSILON,
    "x0": ks.X0,
    "v": ks.V,
    "velocity": ks.VELOCITY,
    "edm": ks.EDMProcess(0.6).prediction,
}


def example(shape=(6, 3, 4, 4), dtype=torch.float64):
    """Return x0, noise of this shape and t (B,), spread over the range."""
    x0, noise = torch.randn(2, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return x0, noise, torch.linspace(0.03, 0.97, shape[0], dtype=dtype)


def network(x, time, shift=0.0):
    """Return something smooth that depends on both arguments, in the shape of x."""
    return torch.sin(x) + 0.1 * torch.cos(time.to(x.dtype)).view(-1, *[1] * (x.ndim - 1)) + shift


def by_hand(process_name, prediction_name, x0, noise, t, shift=0.0):
    """Return alpha, sigma and the mean squared errors (B,), row by row in plain numbers."""
    alphas, sigmas, losses = [], [], []
    for clean, eps, time in zip(x0, noise, t.tolist(), strict=True):
        scale = 1.0
        if process_name == "discrete":
            step = min(math.floor(time * 1000), 999)
            alpha_bar = PROCESSES["discrete"].alphas_cumprod[step].item()
            alpha, sigma, told = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar), step
        elif process_name == "flow":
            alpha, sigma, told = 1 - time, time, time
        else:
            alpha, sigma = 1.0, 0.002 * (80 / 0.002) ** time
            scale, told = 1 / math.sqrt(sigma**2 + 0.6**2), math.log(sigma) / 4
        norm, edm_norm = math.hypot(alpha, sigma), math.hypot(0.6 * alpha, sigma)
        target = {
            "epsilon": eps,
            "x0": clean,
            "v": (alpha * eps - sigma * clean) / norm,
            "velocity": eps - clean,
            "edm": (0.6 * alpha * eps - sigma * clean / 0.6) / edm_norm,
        }[prediction_name]
        output = torch.sin(scale * (alpha * clean + sigma * eps)) + 0.1 * math.cos(told) + shift
        losses.append((output - target).square().mean())
        alphas.append(alpha)
        sigmas.append(sigma)
    return torch.tensor(alphas).to(x0), torch.tensor(sigmas).to(x0), torch.stack(losses)
