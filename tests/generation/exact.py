"""The network that was trained to perfection on Gaussian data."""

import torch
from torch import Tensor

from kairostep.diffusion import EPSILON, VELOCITY, DiscreteProcess, EDMProcess, FlowProcess, Prediction
from kairostep.diffusion.process import Process

MEAN = torch.tensor([0.3, -0.2], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.36, 0.12], [0.12, 0.25]], dtype=torch.float64)


def natural(process: Process) -> Prediction:
    if isinstance(process, EDMProcess):
        return process.prediction
    return VELOCITY if isinstance(process, FlowProcess) else EPSILON


def alpha_sigma(process: Process, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma (B, 1) at what the network is told, between steps of a discrete process too."""
    if isinstance(process, FlowProcess):
        t = time / process.time_scale
        return 1 - t[:, None], t[:, None]
    if isinstance(process, EDMProcess):
        sigma = (4 * time).exp()[:, None]
        return torch.ones_like(sigma), sigma
    assert isinstance(process, DiscreteProcess)
    log_ratio = (1 / process.alphas_cumprod - 1).log() / 2  # of sigma / alpha
    low = time.floor().long().clamp(max=process.num_steps - 2)
    ratio = torch.lerp(log_ratio[low], log_ratio[low + 1], time - low).exp()[:, None]
    alpha = (1 + ratio.square()).rsqrt()
    return alpha, ratio * alpha


class ExactGaussian:
    """The prediction for x_t (B, 2) of data with this mean and covariance; counts its calls."""

    def __init__(
        self, process: Process, prediction: Prediction, mean: Tensor = MEAN, covariance: Tensor = COVARIANCE
    ) -> None:
        self.process, self.prediction, self.mean, self.covariance = process, prediction, mean, covariance
        self.num_calls = 0

    def __call__(self, seen: Tensor, time: Tensor) -> Tensor:
        """Return the prediction at the times (B,)."""
        self.num_calls += 1
        alpha, sigma = alpha_sigma(self.process, time.double())
        edm = isinstance(self.process, EDMProcess)
        xt = seen.double() * (sigma**2 + self.process.sigma_data**2).sqrt() if edm else seen.double()
        identity = torch.eye(2, dtype=torch.float64)
        total = alpha[..., None] ** 2 * self.covariance + sigma[..., None] ** 2 * identity  # (B, 2, 2)
        centred = torch.linalg.solve(total, (xt - alpha * self.mean)[..., None])
        x0 = self.mean + alpha * (self.covariance @ centred)[..., 0]
        return self.prediction.target(x0, (xt - alpha * x0) / sigma, alpha, sigma)


def square_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.sqrt().diag() @ vectors.T
