"""Losses by time: known values, fair shares of [0, 1], and runs that pair."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Objective, V, min_snr
from kairostep.diffusion.process import Process
from kairostep.evaluation import loss_profile

LINEAR = DiscreteProcess.linear()


def rows(num: int, dims: int = 3, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, dims, dtype=torch.float64, generator=generator)


class Zero(torch.nn.Module):
    """Predicts nothing, and remembers the times it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[Tensor, Tensor]] = []

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return 0."""
        self.shown.append((xt, time))
        return torch.zeros_like(xt)


def test_each_row_is_seen_once_in_each_bin_and_rows_share_a_bin_evenly() -> None:
    model = Zero()
    profile = loss_profile(model, Objective(FlowProcess()), rows(40), num_bins=5, batch_size=7)
    time = torch.cat([time for _, time in model.shown]).view(5, 40)
    assert sorted((time * 200).floor().flatten().tolist()) == list(range(200))
    assert bool((time[1:].min(1).values > time[:-1].max(1).values).all())
    assert [(part.start, part.end) for part in profile.bins] == [(k / 5, (k + 1) / 5) for k in range(5)]
    assert profile.num_evaluations == 200


def test_the_loss_of_each_bin_has_the_value_and_the_error_of_theory() -> None:
    profile = loss_profile(Zero(), Objective(LINEAR, V), rows(4000), num_bins=4, batch_size=4000)
    for part in [*profile.bins]:  # v has variance 1 for data of variance 1, and so has its square a variance of 2 / 3
        assert abs(part.loss.value - 1) < 4 * part.loss.error
        assert part.loss.error == pytest.approx(math.sqrt(2 / 3 / 4000), rel=0.1)
    assert profile.loss.value == pytest.approx(sum(part.loss.value for part in profile.bins) / 4)
    assert abs(profile.loss.value - 1) < 4 * profile.loss.error


def test_the_error_is_the_spread_over_seeds_and_data() -> None:
    found = [loss_profile(Zero(), Objective(LINEAR, V), rows(50, seed=s), num_bins=4, seed=s).loss for s in range(200)]
    spread = float(torch.tensor([estimate.value for estimate in found]).std())
    stated = float(torch.tensor([estimate.error for estimate in found]).square().mean().sqrt())
    assert stated == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("prediction", [X0, V, VELOCITY])
@pytest.mark.parametrize("process", [LINEAR, FlowProcess()], ids=["linear", "flow"])
def test_the_error_of_the_noise_is_the_same_whatever_is_predicted(process: Process, prediction: object) -> None:
    def model_of(kind: object) -> object:
        def model(xt: Tensor, time: Tensor) -> Tensor:
            t = (time.double() + 0.5) / 1000 if isinstance(process, DiscreteProcess) else time.double()
            alpha, sigma = process.alpha(t)[:, None], process.sigma(t)[:, None]
            noise = xt / 3
            return kind.target((xt - sigma * noise) / alpha, noise, alpha, sigma)

        return model

    one, other = (
        loss_profile(model_of(kind), Objective(process, kind), rows(100), num_bins=6) for kind in (EPSILON, prediction)
    )
    assert one.epsilon_mse.value == pytest.approx(one.loss.value, rel=1e-9)
    for mine, theirs in zip(one.bins, other.bins, strict=True):
        assert theirs.epsilon_mse.value == pytest.approx(mine.epsilon_mse.value, rel=1e-3)


def test_runs_pair_whatever_they_were_trained_with() -> None:
    one, other = Zero(), Zero()
    first = loss_profile(one, Objective(LINEAR), rows(30))
    second = loss_profile(other, Objective(LINEAR, X0, min_snr()), rows(30))
    for mine, theirs in zip(one.shown, other.shown, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert first.per_image.shape == second.per_image.shape == (30, 20)
    assert torch.equal(loss_profile(Zero(), Objective(LINEAR), rows(30)).per_image, first.per_image)


@pytest.mark.parametrize("process", [LINEAR, FlowProcess(), EDMProcess(), LINEAR.with_zero_terminal_snr()])
def test_log_snr_falls_and_all_is_finite(process: Process) -> None:
    profile = loss_profile(Zero(), Objective(process, V), rows(50))
    log_snr = torch.tensor([part.log_snr for part in profile.bins])
    assert bool((log_snr.diff() < 0).all())
    assert math.isfinite(profile.epsilon_mse.value)
    assert_close(log_snr.isfinite(), torch.ones(20, dtype=torch.bool))


def test_labels_go_with_their_rows() -> None:
    labels = torch.arange(50) % 7
    x0 = labels.double()[:, None].expand(50, 2)

    def model(xt: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        return class_labels.double()[:, None].expand_as(xt)

    assert loss_profile(model, Objective(LINEAR, X0), x0, labels=labels, batch_size=7).loss.value == 0


def test_the_weighted_loss_has_the_weights_of_the_objective() -> None:
    objective = Objective(LINEAR, V, min_snr())
    profile = loss_profile(Zero(), objective, rows(2000), num_bins=50)
    t = (torch.arange(50) + 0.5) / 50  # bins are narrow: the weight hardly varies within one
    expected = float((profile.per_image.mean(0) * objective.weight(t)).mean())
    assert profile.weighted_loss.value == pytest.approx(expected, rel=0.01)
    assert profile.weighted_loss.value != pytest.approx(profile.loss.value, rel=0.1)
    assert (
        loss_profile(Zero(), Objective(LINEAR, V), rows(50)).weighted_loss
        == loss_profile(Zero(), Objective(LINEAR, V), rows(50)).loss
    )
