"""accelerate: samplers are saved on every rank, go on bitwise, and learn from the steps that the optimizer takes."""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import forget_accelerators
from process_groups import free_port, leave_group, run_ranks
from small_problem import NUM_ROWS, Make, losses_of, make_adaptive, make_root_loss, make_uniform
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.accelerate import Accelerated


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def batch(number: int, rank: int = 0) -> Tensor:
    return torch.randn(NUM_ROWS, 3, generator=torch.Generator().manual_seed(100 * number + rank))


class Training:
    """A loop with accelerate as its documentation has it."""

    def __init__(self, make: Make, *, accumulate: int = 1, scaler: torch.amp.GradScaler | None = None) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = scaler
        bare = nn.Linear(4, 3)
        self.sampler = Accelerated(make(bare), self.accelerator)
        self.model, self.optimizer = self.accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05))

    def step(self, number: int, scale: float = 1.0) -> tuple[ks.Timesteps, Tensor]:
        """Take a step, or add to the gradient of one, and return what was drawn and its losses."""
        x = batch(number, self.accelerator.process_index)
        with self.accelerator.accumulate(self.model):
            drawn = self.sampler.sample(x)
            losses = losses_of(self.model, x, drawn.t)
            self.accelerator.backward((losses * drawn.weight).mean() * scale)
            bare = self.accelerator.unwrap_model(self.model)
            with self.sampler.observe(x, drawn, losses, lambda rows, t: losses_of(bare, x[rows], t)):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return drawn, losses.detach()

    def run(self, numbers: range) -> Tensor:
        """Take these steps and return the times, (steps, rows)."""
        return torch.stack([self.step(number)[0].t for number in numbers])

    def state(self) -> dict[str, Tensor]:
        """Return copies of all that was learned."""
        model = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.clone() for name, value in [*self.sampler.state_dict().items(), *model.items()]}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# One process


@pytest.mark.parametrize("make", [make_root_loss, make_adaptive])
def test_a_sampler_goes_on_bitwise_from_the_accelerators_state(make: Make, tmp_path: Path) -> None:
    whole, first, second = (Training(make) for _ in range(3))
    times = whole.run(range(10))
    first.run(range(6))
    first.accelerator.save_state(str(tmp_path))
    second.accelerator.load_state(str(tmp_path))
    assert torch.equal(second.run(range(6, 10)), times[6:])
    assert_same(second.state(), whole.state())
    untrained = {f"sampler.{name}": value for name, value in make(nn.Linear(4, 3)).state_dict().items()}
    learned = {name for name, value in untrained.items() if not torch.equal(value, whole.state()[name])}
    assert {"sampler.table.rows", "sampler.optimizer.num_updates"} & learned


def test_uniform_gives_the_losses_and_weights_of_the_loop_without_it() -> None:
    with_sampler = Training(make_uniform, accumulate=2)
    plain = Training(make_uniform, accumulate=2)
    uniform = ks.Uniform(seed=3)
    for number in range(6):
        drawn, losses = with_sampler.step(number)
        with plain.accelerator.accumulate(plain.model):
            t = uniform.sample(batch(number)).t
            expected = losses_of(plain.model, batch(number), t)
            plain.accelerator.backward(expected.mean())
            plain.optimizer.step()
            plain.optimizer.zero_grad()
        assert torch.equal(drawn.t, t)
        assert torch.equal(losses, expected.detach())
    assert_close(with_sampler.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_a_step_of_the_optimizer_teaches_the_losses_of_all_its_micro_batches() -> None:
    training, alone = Training(make_root_loss, accumulate=3), ks.RootLoss(num_bins=4, warmup=4, refresh=2, gate=1.0)
    shown = []
    for number in range(7):
        before = training.model.weight.detach().clone()
        shown.append(training.step(number))
        assert torch.equal(training.model.weight, before) == (number % 3 != 2)
        if number % 3 == 2:
            alone.record(torch.cat([drawn.t for drawn, _ in shown]), torch.cat([losses for _, losses in shown]))
            shown.clear()
    assert training.sampler.sampler.steps.num_steps == 2
    assert int(training.sampler.sampler.squares.num_seen.sum()) == 6 * NUM_ROWS
    assert torch.equal(training.sampler.sampler.squares.read(), alone.squares.read())


@pytest.mark.parametrize("make", [make_root_loss, make_adaptive])
def test_a_step_that_the_scaler_skips_earns_nothing(make: Make) -> None:
    training = Training(make, scaler=torch.amp.GradScaler("cpu"))
    before = training.model.weight.detach().clone()
    training.step(0, scale=1e38)  # the gradient overflows, the losses do not
    assert training.accelerator.optimizer_step_was_skipped
    assert torch.equal(training.model.weight, before)
    sampler = training.sampler.sampler
    assert sampler.steps.num_steps == 1
    if isinstance(sampler, ks.Adaptive):
        assert torch.equal(sampler.reward, torch.zeros(2))
    assert int(next(v for name, v in sampler.diagnostics().items() if "skipped" in name)) == 0
    training.step(1)
    assert not training.accelerator.optimizer_step_was_skipped
    assert not torch.equal(training.model.weight, before)


def test_a_folder_without_the_sampler_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path))
    Accelerated(ks.RootLoss(), accelerator)
    with pytest.raises(
        FileNotFoundError, match=r"must hold the sampler 'timestep_sampler', .* no timestep_sampler_0.pt"
    ):
        accelerator.load_state(str(tmp_path))


def test_a_sampler_that_a_folder_need_not_have_starts_afresh_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path))
    sampler = Accelerated(ks.RootLoss(), accelerator, required=False)
    before = {key: value.clone() for key, value in sampler.sampler.state_dict().items()}
    accelerator.load_state(str(tmp_path))
    assert caplog.messages == [f"{tmp_path} was saved without a timestep sampler: it starts afresh"]
    assert all(torch.equal(value, before[key]) for key, value in sampler.sampler.state_dict().items())


def test_the_state_of_another_sampler_is_refused(tmp_path: Path) -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    Accelerated(ks.RootLoss(num_bins=4), first)
    Accelerated(ks.LossSecondMoment(), second)
    first.save_state(str(tmp_path))
    with pytest.raises(ValueError, match="must hold the state of a LossSecondMoment made with the same arguments"):
        second.load_state(str(tmp_path))


def test_the_state_of_another_fixed_density_is_refused(tmp_path: Path) -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    Accelerated(ks.Uniform(), first)
    Accelerated(ks.LogitNormal(), second)
    first.save_state(str(tmp_path))
    with pytest.raises(ValueError, match=r"state of a LogitNormal .*\nit is of a Uniform"):
        second.load_state(str(tmp_path))


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    Accelerated(ks.RootLoss(), accelerator)
    accelerator.save_state("state")
    torch.save({"processes": 1, "sampler": Payload()}, "state/timestep_sampler_0.pt")
    with pytest.raises(pickle.UnpicklingError):
        accelerator.load_state("state")
    assert not Path("unpickled").exists()


def test_two_samplers_need_two_names(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    Accelerated(ks.RootLoss(), accelerator)
    with pytest.raises(ValueError, match=r"must have different names, got 'timestep_sampler' twice: pass name="):
        Accelerated(ks.RootLoss(), accelerator)
    Accelerated(ks.RootLoss(), accelerator, name="second")
    accelerator.save_state(str(tmp_path))
    assert {path.name for path in tmp_path.glob("*.pt")} == {"timestep_sampler_0.pt", "second_0.pt"}
    with pytest.raises(ValueError, match="must be a kairostep sampler"):
        Accelerated(accelerator, ks.Uniform())


def test_what_asks_for_losses_must_be_given_them_in_every_micro_batch() -> None:
    sampler = Accelerated(make_adaptive(nn.Linear(4, 3)), Accelerator(cpu=True, gradient_accumulation_steps=2))
    x = batch(0)
    assert sampler.uses_x0
    with pytest.raises(ValueError, match=r"Adaptive asks for losses at other times: .*loss_at\(rows, t\)"):
        sampler.observe(x, sampler.sample(x), torch.zeros(NUM_ROWS))
    free = Accelerated(ks.RootLoss(), sampler.accelerator, name="free")
    with free.observe(x, free.sample(x), torch.ones(NUM_ROWS)):
        pass
    assert free.diagnostics().keys() == ks.RootLoss().diagnostics().keys()
    assert_close(free.density(4), torch.full((4,), 0.25))


def test_importing_kairostep_imports_no_other_library() -> None:
    foreign = ("diffusers", "accelerate", "lightning", "pytorch_lightning", "transformers", "peft")
    modules = "kairostep, kairostep.integrations, kairostep.integrations.diffusers, kairostep.integrations.accelerate"
    code = f"import sys, {modules}; print([name for name in {foreign!r} if name in sys.modules])"
    source = str(Path(ks.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Two processes


def run_rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    results: dict[str, Any] = {}
    for make in (make_root_loss, make_adaptive):
        whole, first, second, third = (Training(make) for _ in range(4))
        times = whole.run(range(10))
        first.run(range(6))
        saved = Path(folder) / make.__name__
        first.accelerator.save_state(str(saved))
        first.accelerator.wait_for_everyone()
        second.accelerator.load_state(str(saved))
        resumed = second.run(range(6, 10))
        first.accelerator.wait_for_everyone()
        if rank == 1:
            (saved / "timestep_sampler_1.pt").unlink()  # as if the main process alone had saved
        third.accelerator.load_state(str(saved))
        again = third.run(range(6, 10))
        results[make.__name__] = {
            "times": [times[6:], resumed, again],
            "states": [training.state() for training in (whole, second, third)],
        }
    torch.save(results, f"{folder}/{rank}.pt")
    leave_group()


@pytest.fixture(scope="module")
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, str(folder), free_port())
    return folder


@pytest.mark.parametrize("name", ["make_root_loss", "make_adaptive"])
def test_every_rank_goes_on_bitwise(folder_of_ranks: Path, name: str) -> None:
    ranks = [torch.load(folder_of_ranks / f"{rank}.pt", weights_only=True)[name] for rank in range(2)]
    for rank in ranks:
        whole, resumed, without_own_file = rank["times"]
        assert torch.equal(resumed, whole)
        assert torch.equal(without_own_file, whole)
        for state in rank["states"]:
            assert_same(state, ranks[0]["states"][0])
    assert not bool((ranks[0]["times"][1] == ranks[1]["times"][1]).any())  # one state, but not the same draws


def test_another_number_of_processes_goes_on_with_what_was_learned(
    folder_of_ranks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(make_root_loss)
    with caplog.at_level(logging.WARNING, logger="kairostep"):
        training.accelerator.load_state(str(folder_of_ranks / "make_root_loss"))
    assert "saved by 2 processes and goes on with what it learned on 1" in caplog.text
    saved = torch.load(folder_of_ranks / "make_root_loss" / "timestep_sampler_0.pt", weights_only=True)
    assert_same(training.sampler.sampler.state_dict(), saved["sampler"])
    assert training.sampler.sampler.steps.num_steps == 6
    training.run(range(2))
