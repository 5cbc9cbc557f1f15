"""On a GPU: the figures of a CPU."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import DiscreteProcess, EDMProcess, FlowProcess, Objective, V
from kairostep.diffusion.process import Process
from kairostep.evaluation import feature_statistics, load_inception, loss_profile, variational_bound

pytestmark = pytest.mark.gpu


class Half(torch.nn.Module):
    """Some network."""

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return half of x_t, and a little of the time."""
        return xt / 2 + time.to(xt.dtype)[:, None] * 1e-4


@pytest.mark.parametrize("process", [DiscreteProcess.linear(), FlowProcess(), EDMProcess()])
def test_held_out_figures_are_those_of_a_cpu(process: Process) -> None:
    x0 = torch.rand(64, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    objective, model = Objective(process, V), Half()
    for levels in (256, None):
        bounds = [variational_bound(model, objective, x.detach(), levels=levels) for x in (x0, x0.cuda())]
        assert_close(bounds[1].per_image.cpu(), bounds[0].per_image, rtol=1e-3, atol=1e-3)
    profiles = [loss_profile(model, objective, x) for x in (x0, x0.cuda())]
    assert_close(profiles[1].per_image.cpu(), profiles[0].per_image, rtol=1e-4, atol=1e-5)


class Patches(torch.nn.Module):
    """Stands in for Inception: a convolution, which a GPU would compute in TensorFloat-32."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 75, stride=75)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 16)."""
        return self.convolution(x).mean(dim=(2, 3))


def test_features_are_those_of_a_cpu(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Patches()).save(str(tmp_path / "patches.pt"))
    images = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8)
    one, other = (
        feature_statistics(
            load_inception(tmp_path / "patches.pt", sha256=None, device=device),
            iter(torch.split(images, 30)),
            device=device,
        )
        for device in ("cpu", "cuda")
    )
    assert_close(other.moments.covariance.cpu(), one.moments.covariance, rtol=1e-4, atol=1e-8)
    assert_close(other.sample.rows, one.sample.rows, rtol=1e-4, atol=1e-5)
