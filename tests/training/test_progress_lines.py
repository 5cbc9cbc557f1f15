"""What a run tells without a terminal: how long it will take, where it is every minute, what to know before it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from small_runs import SMALL, configure

import kairostep as ks
from kairostep import progress_meter
from kairostep.experiments import PRESETS, Component, Config, Experiment, preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.parts import make_network
from kairostep.training import Run
from kairostep.training.progress_lines import (
    TrainingProgress,
    cpu_notes,
    describe_noise,
    pairs_notes,
    warmup_notes,
    weighting_notes,
)
from kairostep.training.stopwatch import Stopwatch


class Clock:
    """Stands in for `time`; moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


class Watch(Stopwatch):
    """A stopwatch of training that follows such a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.device("cpu"))
        self.clock = clock

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.clock.now - 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_meter, "time", clock)
    return clock


def config(**changes: int) -> Config:
    plain: Config = configure(Path("unused"), SMALL)
    return replace(plain, **changes)  # type: ignore[arg-type]


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_slow_run_says_after_its_first_steps_how_long_it_will_take(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingProgress(config(steps=1000, log_every=500), Watch(clock), 0, shown=True) as progress:
        for seconds in (300.0, 8.0):  # the first one also reads the data
            clock.now += seconds
            progress.advance(lambda: 0.5)
        first = told(capsys)
        clock.now += 9.0
        progress.advance(lambda: 0.25)
    assert first[0] == "step 1/1000: loss 0.50000, 0.0533 images/s, 3 d 11 h left"
    assert told(capsys) == [
        "about 2 h 29 min for the 997 steps to come, on this cpu; a GPU is many times faster, or pass fewer --steps, "
        "a smaller --batch_size or a smaller --network"
    ]


def test_there_is_a_line_at_least_every_minute_with_the_latest_loss(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    times, losses = [], iter(range(1000))
    with TrainingProgress(config(steps=1000, log_every=1000), Watch(clock), 0, shown=True) as progress:
        for _ in range(100):
            clock.now += 7.0
            progress.advance(lambda: float(next(losses)))
            times += [clock.now] * bool(told(capsys))
    gaps = [after - before for before, after in zip([100.0, *times], [*times, clock.now], strict=True)]
    assert max(gaps) <= 70  # a minute and the step that was under way
    assert next(losses) == len(times) - 1  # one line is the estimate; no other loss was waited for


def test_log_steps_have_a_line_each(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(config(steps=4, batch_size=16), Watch(clock), 0, shown=True) as progress:
        for step in range(1, 5):
            clock.now += 0.5
            progress.advance(lambda: pytest.fail("nothing is due"))
            progress.show({"loss": 1 / step}, always=False)
    lines = told(capsys)
    assert lines[0] == "step 1/4: loss 1.00000, 32 images/s, 2 s left"
    assert lines[3] == "step 4/4: loss 0.25000, 32 images/s"
    assert len(lines) == 4


def test_other_processes_tell_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(config(steps=9), Watch(clock), 0, shown=False) as progress:
        for _ in range(9):
            clock.now += 100.0
            progress.advance(lambda: pytest.fail("not shown"))
    assert told(capsys) == []


def test_the_noise_that_draws_save_is_told_once_when_it_has_settled(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = [1.0, 0.7, 0.56, 0.55, 0.55]
    chosen = replace(config(steps=1000, log_every=100), sampler=Component("root_loss"))
    with TrainingProgress(chosen, Watch(clock), 0, shown=True) as progress:
        for number, ratio in enumerate(ratios, start=1):
            progress.step = 100 * number
            sampler = {"noise_ratio": ratio, "equivalent_batch": 128 / ratio, "gate": 1.0}
            progress.show({"step": progress.step, "sampler": sampler}, always=False)
    assert told(capsys) == ["root_loss: gradient noise about 0.55 of uniform's, like a batch of 233"]
    assert describe_noise("root_loss", {"noise_ratio": 1.0, "equivalent_batch": 128.0, "gate": 0.0}) == (
        "root_loss: off, since the loss is nearly flat in t: draws are uniform"
    )


def test_it_is_told_again_when_the_gate_has_changed_and_never_of_a_warm_up(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = (
        [(1.0, 0.0, 1.0)] * 4 + [(0.8, 1.0, 0.0)] * 4 + [(1.0, 0.0, 0.0), (0.8, 1.0, 0.0)] * 2 + [(1.0, 0.0, 0.0)] * 3
    )
    chosen = replace(config(steps=2000, log_every=100), sampler=Component("root_loss"))
    with TrainingProgress(chosen, Watch(clock), 0, shown=True) as progress:
        for number, (ratio, gate, warming_up) in enumerate(seen, start=1):
            progress.step = 100 * number
            sampler = {"noise_ratio": ratio, "equivalent_batch": 128 / ratio, "gate": gate, "warming_up": warming_up}
            progress.show({"step": progress.step, "sampler": sampler}, always=False)
    assert told(capsys) == [
        "root_loss: gradient noise about 0.80 of uniform's, like a batch of 160",
        "root_loss: off, since the loss is nearly flat in t: draws are uniform",
    ]


class Flow:
    """As flow matching: the loss is the same at every t, the gradient of its parameters is not."""

    def __init__(self) -> None:
        self.weights = torch.zeros(48, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weights], lr=0.0)
        self.generator = torch.Generator().manual_seed(0)

    def train(self, sampler: ks.TimestepSampler, num_steps: int) -> None:
        """Take steps that change nothing."""
        for _ in range(num_steps):
            x = torch.randn(64, 49, generator=self.generator)
            drawn = sampler.sample(x)

            def loss_at(rows: torch.Tensor, t: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
                return ((0.3 + 3 * t) * (x[rows, :-1] @ self.weights) - x[rows, -1]).square()

            with sampler.observe(x, drawn, loss_at(torch.arange(len(x)), drawn.t).detach(), loss_at):
                pass


def test_least_noise_is_not_called_off_before_it_has_probed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = replace(config(steps=1000, log_every=50), sampler=Component("least_noise"))
    problem, lines = Flow(), {}
    sampler, root_loss = ks.LeastNoise(problem.optimizer), ks.RootLoss()
    with TrainingProgress(chosen, Watch(clock), 0, shown=True) as progress:
        for step in range(50, 401, 50):
            problem.train(sampler, 50)
            progress.step = step
            diagnostics = {key: float(value) for key, value in sampler.diagnostics().items()}
            assert diagnostics["warming_up"] == (step < 170)  # ten probes from step 160
            progress.show({"sampler": diagnostics}, always=False)
            lines[step] = told(capsys)
    assert [step for step, line in lines.items() if line] == [250]
    assert lines[250][0].startswith("least_noise: gradient noise about 0.")
    problem.train(root_loss, 39)
    assert float(root_loss.diagnostics()["warming_up"]) == 1
    problem.train(root_loss, 1)
    assert float(root_loss.diagnostics()["warming_up"]) == 0


@pytest.mark.parametrize(("warmup_steps", "steps"), [(0, 1), (1, 10), (100, 1000), (100, 1009)])
def test_a_warm_up_of_a_tenth_of_the_run_needs_no_note(warmup_steps: int, steps: int) -> None:
    assert warmup_notes(config(steps=steps, warmup_steps=warmup_steps)) == []


@pytest.mark.parametrize(("warmup_steps", "steps"), [(1, 9), (101, 1000), (5000, 2000)])
def test_a_longer_warm_up_has_a_note_whose_fix_needs_none(warmup_steps: int, steps: int) -> None:
    long = config(steps=steps, warmup_steps=warmup_steps)
    (note,) = warmup_notes(long)
    assert f"{warmup_steps} of {steps} steps" in note
    assert note.endswith(f"pass --warmup_steps={steps // 10}")
    assert warmup_notes(replace(long, warmup_steps=steps // 10)) == []


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_warms_up_for_more_than_a_tenth_of_its_steps(name: str) -> None:
    assert warmup_notes(preset(name)) == []


def test_a_preset_of_the_paper_has_the_note_if_a_program_shortens_it() -> None:
    (note,) = warmup_notes(replace(preset("cifar10-ddpm"), steps=2000))
    assert "5000 of 2000 steps" in note


def test_root_loss_has_a_note_where_it_was_measured_to_harm() -> None:
    steep = replace(preset("digits"), weighting=Component("debias"), sampler=Component("root_loss"))
    (note,) = weighting_notes(steep)
    assert note.endswith("pass --sampler=uniform, or another --weighting")
    assert weighting_notes(replace(steep, sampler=Component("uniform"))) == []
    assert weighting_notes(replace(steep, weighting=Component("min_snr"))) == []


def test_pairs_over_several_processes_have_a_note() -> None:
    paired = replace(preset("digits"), pairs=True)
    assert pairs_notes(paired, 1, replays=True) == pairs_notes(preset("digits"), 2, replays=True) == []
    (eager,), (replayed,) = (pairs_notes(paired, 2, replays=replays) for replays in (False, True))
    assert (
        "are made over all 2 processes: they exchange the images, times and labels of each micro-batch; a new" in eager
    )
    assert "of each micro-batch, and run the backward pass eagerly, not as a CUDA graph; a new run with" in replayed


SHAPES = {"digits": (1, 8, 8), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32), "images": (3, 64, 64)}


def cpu_notes_of(config: Config, shape: tuple[int, ...] = (), num_threads: int = 2) -> list[str]:
    """Return the notes for a run on so many threads of a CPU."""
    shape = shape or SHAPES[config.data.name]
    with torch.device("meta"):
        model = make_network(config.network, shape[1], shape[0], None)
    return cpu_notes(cast(Experiment, SimpleNamespace(config=config, dataset=FakeSet(shape), model=model)), num_threads)


class FakeSet(NamedTuple):
    """What a note reads of a data set."""

    shape: tuple[int, ...]


@pytest.mark.parametrize("name", ["digits", "digits-flow", "digits-edm", "fashion-mnist"])
def test_presets_for_a_cpu_have_no_note_that_they_take_days(name: str) -> None:
    assert cpu_notes_of(preset(name), num_threads=1) == []


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_a_run_that_takes_a_cpu_days_has_a_note_with_settings_that_need_none(num_threads: int) -> None:
    (note,) = cpu_notes_of(preset("images"), num_threads=num_threads)
    assert (
        "this run takes days on a CPU, 50000 steps of 64 samples 64x64 with 26.6M parameters: train on a GPU, or pass"
        in note
    )
    settings = note.partition("or pass ")[2].split()
    assert settings == ["--data.size=32", "--network.channels=32", "--steps=5000"]  # as docs/training.md has them
    smaller = with_overrides(preset("images"), settings)
    assert cpu_notes_of(smaller, (3, 32, 32), num_threads) == []


def test_a_note_names_settings_that_the_run_has() -> None:
    (latent,) = cpu_notes_of(preset("celebahq-ldm"), (3, 64, 64))
    assert latent.endswith("or pass --network.channels=32 --steps=5000")
    (transformer,) = cpu_notes_of(replace(preset("imagenet-dit")), (4, 32, 32))
    assert transformer.endswith("or pass --steps=5000 and a smaller --network")


def test_the_note_comes_before_a_run_on_a_cpu_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(configure(tmp_path / "run", SMALL))
    assert not any("days on a CPU" in note for note in run.notes)
    monkeypatch.setattr("kairostep.training.progress_lines.WORK_PER_SECOND", 1e-3)
    assert any("days on a CPU" in note for note in run.notes)
    monkeypatch.setattr(run.trainer, "step_number", 1)  # who resumes it knows
    assert not any("days on a CPU" in note for note in run.notes)
    run.lock.release()
