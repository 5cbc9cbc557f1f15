"""A sampler on an optimizer's hooks learns what it would learn around `optimizer.step()`."""

import copy
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerators import forget_accelerators
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.optimizer_hooks import StepObserver

PROCESS = ks.DiscreteProcess.linear(100)
OBJECTIVE = ks.Objective(PROCESS)


class Loop:
    """A small training loop, its sampler observed around the step or on the optimizer's hooks."""

    def __init__(self, kind: str, *, hooks: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.sampler = make_sampler(kind, self.model)
        self.observer = StepObserver(self.sampler, self.optimizer) if hooks else None

    def loss_at(self, x: Tensor) -> ks.LossAt:
        """Return losses of rows of x at t."""
        return lambda rows, t: OBJECTIVE(lambda xt, time: self.model(xt), x[rows], t)

    def drawn(self, step: int) -> tuple[Tensor, ks.Timesteps, Tensor, ks.LossAt]:
        """Draw a batch, run backward, and return what there is to show."""
        torch.manual_seed(100 + step)
        x = torch.randn(16, 4)
        drawn, loss_at = self.sampler.sample(x), self.loss_at(x)
        losses = loss_at(torch.arange(16), drawn.t)
        (losses * drawn.weight).mean().backward()
        return x, drawn, losses.detach(), loss_at

    def step(self, step: int) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        shown = self.drawn(step)
        if self.observer is not None:
            self.observer.show(*shown)
            self.optimizer.step()
        else:
            with self.sampler.observe(*shown):
                self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return all that was learned."""
        return {**self.model.state_dict(), **{f"sampler.{k}": v for k, v in self.sampler.state_dict().items()}}


def make_sampler(kind: str, model: nn.Module) -> ks.TimestepSampler:
    if kind == "adaptive":
        policy = ks.BetaPolicy.for_input((4,), hidden=8)
        return ks.Adaptive(policy, num_steps=100, probing=ks.Probing(every=3, sweep=10, reward_rows=4), model=model)
    if kind == "gradient_variance":
        return ks.GradientVariance(model.parameters(), num_bins=5, every=1, rows_per_gradient=4)
    if kind == "second_moment":
        return ks.LossSecondMoment(5, history=3)
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


@pytest.mark.parametrize("kind", ["root_loss", "adaptive"])
def test_hooks_teach_what_a_wrapped_step_teaches(kind: str) -> None:
    plain, hooked = Loop(kind, hooks=False), Loop(kind, hooks=True)
    for step in range(12):
        plain.step(step)
        hooked.step(step)
    torch.testing.assert_close(hooked.state(), plain.state(), rtol=0, atol=0)
    assert float(hooked.sampler.density(5).max()) > 0.205


@pytest.mark.parametrize("kind", ["root_loss", "adaptive"])
def test_a_run_resumed_from_what_was_saved_goes_on_bitwise(kind: str) -> None:
    whole, first, second = (Loop(kind, hooks=True) for _ in range(3))
    for step in range(12):
        whole.step(step)
    for step in range(7):
        first.step(step)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.sampler.state_dict()))
    for part, state in zip((second.model, second.optimizer, second.sampler), saved, strict=True):
        part.load_state_dict(state)  # hooks stay on an optimizer whose state is loaded
    for step in range(7, 12):
        second.step(step)
    torch.testing.assert_close(second.state(), whole.state(), rtol=0, atol=0)


def test_every_micro_batch_shown_before_a_step_is_learned_from() -> None:
    loop = Loop("root_loss", hooks=True)
    shown = [loop.drawn(step) for step in range(3)]
    for own in shown:
        loop.observer.show(*own)
    loop.optimizer.step()
    expected = ks.RootLoss(num_bins=5)
    expected.record(torch.cat([own[1].t for own in shown]), torch.cat([own[2] for own in shown]))
    torch.testing.assert_close(loop.sampler.squares.state_dict(), expected.squares.state_dict(), rtol=0, atol=0)
    assert int(loop.sampler.squares.num_seen.sum()) == 48
    assert loop.sampler.steps.num_steps == 1  # of the optimizer


def test_a_sampler_that_asks_for_losses_measures_the_last_micro_batch() -> None:
    last, several = Loop("adaptive", hooks=True), Loop("adaptive", hooks=True)
    for loop in (last, several):
        first, second = loop.drawn(0), loop.drawn(1)
        if loop is several:
            loop.observer.show(*first)
        loop.observer.show(*second)
        loop.optimizer.step()
    torch.testing.assert_close(several.state(), last.state(), rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_whose_gradient_is_cleared_belongs_to_no_step(set_to_none: bool) -> None:
    loop = Loop("root_loss", hooks=True)
    loop.observer.show(*loop.drawn(0))
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.observer.show(*loop.drawn(1))
    loop.optimizer.zero_grad(set_to_none=set_to_none)  # a loop that clears them between the loss and backward
    loop.optimizer.step()
    assert int(loop.sampler.squares.num_seen.sum()) == 16


def test_a_step_without_a_batch_warns_once_and_is_counted() -> None:
    loop = Loop("root_loss", hooks=True)
    loop.step(0)
    with pytest.warns(UserWarning, match=r"call observer\.show"):
        loop.optimizer.step()
    loop.optimizer.step()
    assert loop.observer.num_unseen == 2
    assert int(loop.sampler.squares.num_seen.sum()) == 16
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    quiet = StepObserver(ks.Uniform(), optimizer)
    optimizer.step()  # warnings are errors here: a sampler that learns nothing anyway has nothing to say
    assert quiet.num_unseen == 1


def test_a_closure_that_computes_the_losses_is_observed_before_the_update() -> None:
    plain, closed = Loop("adaptive", hooks=False), Loop("adaptive", hooks=True)

    for step in range(8):
        plain.step(step)

        def closure(step: int = step) -> Tensor:
            closed.optimizer.zero_grad()
            shown = closed.drawn(step)
            closed.observer.show(*shown)
            return shown[2].mean()

        returned = closed.optimizer.step(closure) if step % 2 else closed.optimizer.step(closure=closure)
        assert returned.shape == ()
    torch.testing.assert_close(closed.state(), plain.state(), rtol=0, atol=0)


def test_an_optimizer_that_calls_its_closure_often_is_observed_once_a_step() -> None:
    loop = Loop("root_loss", hooks=False)
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=5)
    observer = StepObserver(loop.sampler, optimizer)
    x = torch.randn(16, 4)
    drawn, first = loop.sampler.sample(x), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(0)
        losses = loop.loss_at(x)(torch.arange(16), drawn.t)
        first.append(losses.detach())
        observer.show(x, drawn, losses)
        losses.mean().backward()
        return losses.mean()

    optimizer.step(closure)
    assert len(first) > 1
    assert int(loop.sampler.squares.num_seen.sum()) == 16
    expected = ks.RootLoss(num_bins=5)
    expected.record(drawn.t, first[0])
    torch.testing.assert_close(loop.sampler.squares.read(), expected.squares.read())
    with pytest.warns(UserWarning, match="without a batch"):  # what later calls showed belongs to no other step
        optimizer.step(lambda: torch.tensor(0.0))


@pytest.mark.parametrize("order", ["clear, backward, show", "clear, show, backward", "show, clear, backward"])
@pytest.mark.parametrize("attached", [True, False])
def test_a_step_that_the_grad_scaler_skips_teaches_nothing(order: str, attached: bool) -> None:
    loop = Loop("root_loss", hooks=True)
    scaler = torch.amp.GradScaler("cpu")
    for step, bad in enumerate([True, False]):
        torch.manual_seed(step)
        x = torch.randn(16, 4)
        drawn = loop.sampler.sample(x)
        losses = loop.loss_at(x)(torch.arange(16), drawn.t)
        actions = {
            "clear": loop.optimizer.zero_grad,
            "show": partial(loop.observer.show, x, drawn, losses if attached else losses.detach()),
            "backward": scaler.scale(losses.mean() * (torch.inf if bad else 1)).backward,
        }
        for action in order.split(", "):
            actions[action]()
        scaler.step(loop.optimizer)
        scaler.update()
        assert int(loop.sampler.squares.num_seen.sum()) == (0 if bad else 16)
    assert loop.observer.num_unseen == 0


class Breaking(torch.optim.SGD):
    """Raises while broken; else steps, within the hooks of both classes."""

    broken = True

    def step(self, closure=None):
        """Take a step or raise."""
        if self.broken:
            raise OSError("out of power")
        return super().step(closure)


@pytest.mark.parametrize("kind", ["root_loss", "second_moment", "adaptive", "gradient_variance"])
def test_a_step_that_raises_teaches_nothing_and_the_next_is_observed(kind: str) -> None:
    loop = Loop(kind, hooks=False)
    optimizer = Breaking(loop.model.parameters(), lr=0.1)
    observer = StepObserver(loop.sampler, optimizer)
    torch.manual_seed(0)
    for step in range(2):  # micro-batches
        observer.show(*loop.drawn(step))
    before = learned(loop.sampler)
    with pytest.raises(OSError, match="out of power"):
        optimizer.step()
    torch.testing.assert_close(learned(loop.sampler), before, rtol=0, atol=0)
    optimizer.broken = False
    shown = loop.drawn(2)
    torch.testing.assert_close(learned(loop.sampler), before, rtol=0, atol=0)
    observer.show(*shown)
    optimizer.step()
    if kind == "root_loss":
        assert int(loop.sampler.squares.num_seen.sum()) == 16  # of the second step alone
    if kind == "adaptive":
        torch.testing.assert_close(learned(loop.sampler), before)  # probes every third
        assert loop.sampler.steps.num_steps == 2  # both were entered, each once
    assert observer.num_unseen == 0


def learned(sampler: ks.TimestepSampler) -> dict[str, Tensor]:
    """Return copies of the sampler's state, without the counters of draws and steps."""
    state = sampler.state_dict()
    return {k: v.clone() for k, v in state.items() if not k.startswith(("draws", "steps"))}


def test_a_closure_that_raises_leaves_the_observer_working() -> None:
    loop = Loop("root_loss", hooks=True)

    def broken() -> Tensor:
        raise OSError("out of power")

    with pytest.raises(OSError, match="out of power"):
        loop.optimizer.step(broken)
    for step in range(3):
        loop.step(step)
    assert int(loop.sampler.squares.num_seen.sum()) == 48


def test_removed_hooks_observe_no_more() -> None:
    loop = Loop("root_loss", hooks=False)
    with StepObserver(loop.sampler, loop.optimizer) as observer:
        observer.show(*loop.drawn(0))
        loop.optimizer.step()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert int(loop.sampler.squares.num_seen.sum()) == 16
    assert observer.num_unseen == 0
    assert loop.optimizer.zero_grad.__func__ is torch.optim.Adam.zero_grad
    with pytest.raises(RuntimeError, match="make a new StepObserver"):
        observer.show(*loop.drawn(1))


def test_an_optimizer_that_accelerate_wraps_is_observed() -> None:
    loop = Loop("root_loss", hooks=False)
    forget_accelerators()
    try:
        wrapped = Accelerator(cpu=True).prepare(loop.optimizer)
        assert wrapped is not loop.optimizer
        observer = StepObserver(loop.sampler, wrapped)
        observer.show(*loop.drawn(0))
        wrapped.step()
        wrapped.zero_grad(set_to_none=True)  # it looks for the argument in the optimizer's own
    finally:
        forget_accelerators()
    assert int(loop.sampler.squares.num_seen.sum()) == 16


def test_what_cannot_work_is_refused() -> None:
    loop = Loop("adaptive", hooks=True)
    x, drawn, losses, _ = loop.drawn(0)
    with pytest.raises(ValueError, match=r"Adaptive asks for losses at other times: .*loss_at\(rows, t\)"):
        loop.observer.show(x, drawn, losses)
    with pytest.raises(ValueError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        StepObserver(ks.Uniform(), loop.model)
    with pytest.raises(ValueError, match="sampler must be a kairostep sampler"):
        StepObserver("uniform", loop.optimizer)


@pytest.mark.parametrize("num_batches", [1, 2, 4])
@pytest.mark.parametrize("attached", [True, False])
def test_gradients_may_be_cleared_between_the_first_loss_and_its_backward_pass(
    num_batches: int, attached: bool
) -> None:
    loop = Loop("root_loss", hooks=True)
    for step in range(3):
        for number in range(num_batches):
            x, drawn, _, loss_at = loop.drawn(num_batches * step + number)
            losses = loop.loss_at(x)(torch.arange(len(x)), drawn.t)
            loop.observer.show(x, drawn, losses if attached else losses.detach(), loss_at)
            if number == 0:
                loop.optimizer.zero_grad()
            losses.mean().backward()
        loop.optimizer.step()
    known = num_batches if attached or num_batches == 1 else num_batches - 1  # detached losses cannot tell
    assert int(loop.sampler.squares.num_seen.sum()) == 3 * known * 16


def test_the_optimizer_is_named_to_a_sampler_that_needs_it() -> None:
    loop = Loop("root_loss", hooks=False)
    sampler = ks.LeastNoise(num_bins=5, warmup=2)
    StepObserver(sampler, loop.optimizer)
    assert sampler.optimizer.value is loop.optimizer
