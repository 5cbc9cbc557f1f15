"""Two processes under gloo: different data and noise, one state, one run that can be stopped and goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import leave_group
from small_runs import (
    ADAPTIVE,
    CONTEXT,
    PATIENCE,
    arguments,
    assert_same_run,
    assert_same_state,
    configure,
    last_step,
    lines_of,
    num_lines,
    rank_environments,
    real_environment,
    start_ranks,
)
from torch import Tensor, nn
from torch.testing import assert_close

from kairostep.data import Batches, load_digits
from kairostep.diffusion import VELOCITY, FlowProcess, Objective
from kairostep.experiments import build
from kairostep.networks import UViT2DModel
from kairostep.runs.recorder import Recorder
from kairostep.timesteps import Timesteps, Uniform
from kairostep.training import Trainer
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer
from kairostep.training.trainer import Step

NUM_STEPS = 12
SETTINGS = {**ADAPTIVE, "steps": 40}


# Two ranks side by side, watched through the public classes


class Watched(Objective):
    """An objective that keeps the noise of every call in training."""

    def __init__(self, plain: Objective) -> None:
        super().__init__(plain.process, plain.prediction, plain.weighting)
        self.noise: list[Tensor] = []

    def __call__(self, model: Any, x0: Tensor, t: Tensor, *, noise: Tensor | None = None, **cond: Any) -> Tensor:
        """Return the losses."""
        noise = torch.randn_like(x0) if noise is None else noise
        if torch.is_grad_enabled():
            self.noise.append(noise)
        return super().__call__(model, x0, t, noise=noise, **cond)


def watch_rank(folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    config = configure(Path(folder), {**SETTINGS, "batch_size": 32})
    accelerator = make_accelerator(config)
    rank = accelerator.process_index
    experiment = build(config, accelerator.device)
    trainer = make_trainer(experiment, accelerator)
    trainer.objective = Watched(experiment.objective)
    batches = make_batches(experiment, accelerator).from_step()
    x0, t = [], []
    for _ in range(NUM_STEPS):
        batch = next(batches)
        x0.append(batch.x0)
        t.append(trainer.step([batch]).drawn.t)
    watched = {
        "num_processes": accelerator.num_processes,
        "x0": torch.stack(x0),
        "t": torch.stack(t),
        "noise": torch.stack(trainer.objective.noise),
        "state": {part: trainer.state_dict()[part] for part in ("model", "sampler", "ema", "optimizer")},
        **watch_recorder(Path(folder), rank),
    }
    torch.save(watched, f"{folder}/{rank}.pt")
    leave_group()


def watch_recorder(folder: Path, rank: int) -> dict[str, Any]:
    """Collect losses of two steps, lose the recorder between them, and summarise."""
    steps = [recorded_step(rank, k) for k in range(2)]
    whole, first, second = (Recorder(folder) for _ in range(3))
    whole.add(steps[0].drawn, steps[0].losses)
    first.add(steps[0].drawn, steps[0].losses)
    second.load_state_dict(first.state_dict(), torch.device("cpu"))
    for recorder in (whole, second):
        recorder.add(steps[1].drawn, steps[1].losses)
    pending = first.state_dict()["pending"]
    return {"summary": whole.summary(), "resumed": second.summary(), "pending": pending, "left": whole.state_dict()}


def recorded_step(rank: int, step: int) -> Step:
    generator = torch.Generator().manual_seed(10 * rank + step)
    t, losses, weight = torch.rand(3, 8, generator=generator).unbind()
    return Step(Timesteps(t * 0.7, weight), losses)  # nothing in the last quartile


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_ranks(watch_rank, tmp_path_factory.mktemp("ranks"))


def results_of_ranks(target: Callable[[str, dict[str, str]], None], folder: Path) -> list[dict[str, Any]]:
    """Run the function on two ranks and return what they saved."""
    processes = [CONTEXT.Process(target=target, args=(str(folder), e)) for e in rank_environments(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_ranks_see_different_data_noise_and_times(ranks: list[dict[str, Any]]) -> None:
    assert [rank["num_processes"] for rank in ranks] == [2, 2]
    first, second = ranks
    rows = torch.cat([first["x0"], second["x0"]], dim=1).flatten(2)  # (steps, 32, pixels)
    for step in range(NUM_STEPS):
        assert len(rows[step].unique(dim=0)) == 32
        assert not bool((first["t"][step, :, None] == second["t"][step]).any())
    assert first["noise"].shape == (NUM_STEPS, 16, 1, 8, 8)
    noise = torch.stack([first["noise"], second["noise"]]).flatten(1)  # (2, 12288)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.05
    assert len(noise.unique()) > 0.99 * noise.numel()  # nor is any step's noise another's


def test_ranks_share_the_batch_of_one_process(ranks: list[dict[str, Any]]) -> None:
    batches = Batches(load_digits(), 32, label_dropout=None).from_step()
    for step in range(NUM_STEPS):
        both = torch.cat([rank["x0"][step] for rank in ranks])
        assert torch.equal(both, next(batches).x0)


def test_ranks_hold_the_same_state(ranks: list[dict[str, Any]]) -> None:
    assert_same_state(ranks[0]["state"], ranks[1]["state"])
    untrained = build(configure(Path("unused"), SETTINGS), torch.device("cpu"))
    before = nn.utils.parameters_to_vector(untrained.sampler.policy.parameters())
    state = ranks[0]["state"]["sampler"]
    after = torch.cat([state[f"policy.{name}"].flatten() for name, _ in untrained.sampler.policy.named_parameters()])
    assert before.shape == after.shape
    assert not torch.equal(before, after)


def test_summary_is_over_both_ranks_and_survives_a_restart(ranks: list[dict[str, Any]]) -> None:
    steps = [recorded_step(rank, k) for rank in range(2) for k in range(2)]
    t, losses = torch.cat([s.drawn.t for s in steps]).double(), torch.cat([s.losses for s in steps]).double()
    weight = torch.cat([s.drawn.weight for s in steps]).double()
    for rank in ranks:
        assert rank["summary"]["loss"] == pytest.approx(float((losses * weight).mean()), abs=1e-15)
        for q, found in enumerate(rank["summary"]["loss_quartiles"][:3]):
            inside = (t >= q / 4) & (t < (q + 1) / 4)
            assert int(inside.sum()) > 0
            assert found == pytest.approx(float(losses[inside].mean()), abs=1e-15)
        assert rank["summary"]["loss_quartiles"][3] != rank["summary"]["loss_quartiles"][3]  # nothing drawn: NaN
        assert_close(rank["resumed"]["loss"], rank["summary"]["loss"], rtol=0, atol=0)
        assert rank["resumed"]["loss_quartiles"][:3] == rank["summary"]["loss_quartiles"][:3]
        assert rank["pending"].shape == (3, 16)  # (t, loss, weight), samples of both ranks
        assert rank["left"]["pending"] is None


def train_own_model(folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = UViT2DModel(8, 1, patch_size=4, hidden_size=16, depth=2, num_heads=2)
    objective = Objective(FlowProcess(), VELOCITY)
    trainer = Trainer(model, objective, Uniform(), torch.optim.SGD(model.parameters(), lr=0.1))
    rank, world_size = trainer.accelerator.process_index, trainer.accelerator.num_processes
    batches = Batches(load_digits(), 16, rank=rank, world_size=world_size, label_dropout=None).from_step()
    times = [trainer.step([next(batches)]).drawn.t for _ in range(3)]
    state = model.state_dict()
    torch.save({"world_size": world_size, "times": torch.stack(times), "model": state}, f"{folder}/{rank}.pt")
    leave_group()


def test_a_users_own_trainer_joins_the_ranks(tmp_path: Path) -> None:
    first, second = results_of_ranks(train_own_model, tmp_path)
    assert first["world_size"] == second["world_size"] == 2
    assert_same_state(first["model"], second["model"])
    assert not bool((first["times"] == second["times"]).any())


# Whole runs


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "pair"
    children = start_ranks(arguments(directory, SETTINGS), directory.with_suffix(".log"))
    assert [child.join() for child in children] == [0, 0], [child.output for child in children]
    assert "on 2 x cpu" in children[0].output
    return directory


def test_two_processes_train(whole_pair: Path) -> None:
    lines = lines_of(whole_pair)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})  # one process writes
    assert lines[-1]["images"] == 40 * 16
    assert (whole_pair / "model" / "model_index.json").exists()


def test_a_signal_to_one_process_stops_both(whole_pair: Path, tmp_path: Path) -> None:
    directory = tmp_path / "pair"
    children = start_ranks(arguments(directory, SETTINGS), tmp_path / "log")
    assert children[0].wait_until(lambda: num_lines(directory) >= 1)
    children[1].tell(signal.SIGTERM)
    assert [child.join() for child in children] == [128 + signal.SIGTERM] * 2
    assert f"stopped at step {last_step(directory)} of 40, saved" in children[0].output
    assert "stopped" not in children[1].output  # one process speaks
    children = start_ranks(arguments(directory, SETTINGS), tmp_path / "log")
    assert [child.join() for child in children] == [0, 0], [child.output for child in children]
    assert_same_run(directory, whole_pair)


def test_a_launcher_that_is_told_to_stop(whole_pair: Path, tmp_path: Path) -> None:
    directory = tmp_path / "pair"
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launch = [accelerate, "launch", "--multi_gpu", "--num_processes", "2", "-m", "kairostep"]  # also without GPUs
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*launch, *arguments(directory, SETTINGS)], env=real_environment(tmp_path), stdout=file, stderr=file
        )
        deadline = time.monotonic() + PATIENCE
        while num_lines(directory) < 1 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) != 0
    output = log.read_text()
    stopped = re.search(r"stopped at step (\d+) of 40, saved; go on with: (.*)$", output, re.MULTILINE)
    assert stopped, output
    assert last_step(directory) == int(stopped[1])
    environment = real_environment(tmp_path)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    again = subprocess.run(stopped[2], shell=True, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    assert_same_run(directory, whole_pair)


def test_a_signal_that_reaches_the_launcher_and_the_processes(tmp_path: Path) -> None:
    directory, log = tmp_path / "pair", tmp_path / "log"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "kairostep"]
    seldom = dict.fromkeys(("steps", "checkpoint_every", "evaluate_every", "density_every"), 10**6)
    with log.open("w") as file:
        command = [*launch, *arguments(directory, {**SETTINGS, **seldom})]
        process = subprocess.Popen(command, env=real_environment(tmp_path), stdout=file, stderr=file)
        deadline = time.monotonic() + PATIENCE
        while num_lines(directory) < 20 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(ranks) == 2  # they agree about every two seconds by now
        for each in (*ranks, process.pid):  # as systemd does
            os.kill(int(each), signal.SIGTERM)
        assert process.wait(PATIENCE) != 0
    again = "torchrun --standalone --nproc_per_node 2 -m kairostep train --config"
    stopped = re.search(rf"stopped at step (\d+) of 1000000, saved; go on with: {again}", log.read_text())
    assert stopped, log.read_text()
    assert last_step(directory) == int(stopped[1])
