"""What training on a range does, for models whose answer is known."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import RangeTraining, Rows, range_effects
from kairostep.analysis.interdependence import train_on_range
from kairostep.analysis.table import interdependence_table, interdependence_verdict

OBJECTIVE = ks.Objective(ks.FlowProcess(), ks.V)
ROWS = Rows(torch.ones(64, 4))
TRAINING = RangeTraining(num_steps=200, batch_size=64, max_grad_norm=None)
ADAM = partial(torch.optim.Adam, lr=0.02)


class Separate(nn.Module):
    """Has a number of its own for each quarter of t."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return the prediction."""
        return self.numbers[(time * 4).long().clamp(max=3)].view(-1, 1).expand_as(xt)


class Shared(nn.Module):
    """Has one number for all t."""

    def __init__(self, number: float = -1.0) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(number))

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return the prediction."""
        return self.number.expand_as(xt)


def test_separate_parameters_are_not_interdependent() -> None:
    effects = range_effects(
        Separate(), OBJECTIVE, ROWS, ROWS, num_ranges=4, num_parts=4, training=TRAINING, make_optimizer=ADAM
    )
    changes = effects.matrix
    assert (changes[0] < -1).all()  # all of [0, 1] first
    off = changes[1:][~torch.eye(4, dtype=torch.bool)]
    assert_close(off, torch.zeros_like(off))
    assert (changes[1:].diagonal() < -1).all()
    assert "nothing lost elsewhere" in interdependence_verdict(effects.effects[1])


def test_a_shared_parameter_is_pulled_to_the_trained_range() -> None:
    model = Shared()
    effects = range_effects(
        model, OBJECTIVE, ROWS, ROWS, num_ranges=2, num_parts=10, training=TRAINING, make_optimizer=ADAM
    )
    assert model.number.item() == -1.0  # it has its weights again
    train_on_range(model, OBJECTIVE, ROWS, (0.0, 0.5), TRAINING, ADAM)
    after = model.number.item()
    t = (torch.arange(10) + 0.5) / 10
    v = -t / (t**2 + (1 - t) ** 2).sqrt()  # the mean target for x0 = 1
    expected = (after - v) ** 2 - (-1.0 - v) ** 2
    assert_close(effects.matrix[1], expected, rtol=0.1, atol=0.15)
    early = effects.effects[1]
    assert early.inside.value < 0 < early.outside.value  # type: ignore[union-attr]
    assert early.balance.value == pytest.approx(early.inside.value + early.outside.value)  # type: ignore[union-attr]
    assert effects.effects[0].outside is None
    assert len(interdependence_table(effects).splitlines()) == 12


def test_ranges_share_rows_times_and_noise() -> None:
    one, other = (
        range_effects(
            Shared(), OBJECTIVE, ROWS, ROWS, num_ranges=2, num_parts=2, training=TRAINING, make_optimizer=ADAM
        )
        for _ in range(2)
    )
    assert torch.equal(one.matrix, other.matrix)


def test_weights_are_put_back_when_it_is_stopped() -> None:
    class Stopping(Shared):
        def forward(self, xt: Tensor, time: Tensor) -> Tensor:
            if self.training and self.number.item() > -0.99:
                raise KeyboardInterrupt
            return super().forward(xt, time)

    model = Stopping()
    with pytest.raises(KeyboardInterrupt):
        range_effects(model, OBJECTIVE, ROWS, ROWS, num_ranges=2, num_parts=2, training=TRAINING, make_optimizer=ADAM)
    assert model.number.item() == -1.0


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_parts must be a multiple of the 3 ranges, got 20: pass for instance 18"):
        range_effects(Shared(), OBJECTIVE, ROWS, ROWS, num_ranges=3, num_parts=20)
    with pytest.raises(ValueError, match="num_steps must be a whole number of at least 1, got 0"):
        RangeTraining(num_steps=0)
