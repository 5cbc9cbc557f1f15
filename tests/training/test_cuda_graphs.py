"""What decides how steps are run, and what a recording depends on: none of it needs a GPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import forget_accelerators
from small_runs import SMALL, configure

from kairostep.experiments import build
from kairostep.training import Run, step_mode
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer
from kairostep.training.cuda_graphs import clone_tensors, recording_key
from kairostep.training.step_mode import COMPILE_FROM, choose_step_mode


def machine(device: str, num_processes: int = 1) -> Any:
    """Return what `choose_step_mode` looks at of an accelerator."""
    return SimpleNamespace(device=torch.device(device), num_processes=num_processes)


@pytest.mark.parametrize(
    ("device", "num_processes", "num_images", "can_compile", "mode", "replays", "why"),
    [
        ("cpu", 1, COMPILE_FROM, True, "plain", False, "cpu has no graphs"),
        ("cuda", 1, COMPILE_FROM, True, "compile", True, "1,280,000 images make up for the minutes of compiling"),
        ("cuda", 1, 1_279_999, True, "graph", True, "1,279,999 images, under 1,280,000, do not make up for compiling"),
        ("cuda", 1, COMPILE_FROM, False, "graph", True, "no Triton or no C compiler is there"),
        ("cuda", 2, 2 * COMPILE_FROM, True, "compile", True, "1,280,000 images make up"),
        ("cuda", 2, COMPILE_FROM, True, "graph", True, "640,000 images, under 1,280,000, do not make up for compiling"),
    ],
)
def test_auto_takes_the_fastest_that_is_possible_and_pays(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_processes: int,
    num_images: int,
    can_compile: bool,
    mode: str,
    replays: bool,
    why: str,
) -> None:
    monkeypatch.setattr(step_mode, "has_compiler", lambda: can_compile)
    chosen = choose_step_mode("auto", num_images, machine(device, num_processes))
    assert (chosen.mode, chosen.replays) == (mode, replays)
    assert why in chosen.why


@pytest.mark.parametrize(
    ("asked", "device", "num_processes", "replays"),
    [
        ("plain", "cuda", 1, False),
        ("graph", "cuda", 1, True),
        ("graph", "cuda", 2, True),
        ("compile", "cuda", 1, True),
        ("compile", "cpu", 2, False),
    ],
)
def test_what_is_asked_for_is_taken(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: str, num_processes: int, replays: bool
) -> None:
    monkeypatch.setattr(step_mode, "has_compiler", lambda: True)
    chosen = choose_step_mode(asked, 10, machine(device, num_processes))
    assert (chosen.mode, chosen.replays, chosen.why) == (asked, replays, "as asked")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_graph_is_refused_where_it_cannot_be(num_processes: int) -> None:
    with pytest.raises(ValueError, match="speed graph must have a CUDA GPU, got cpu: pass --speed=auto"):
        choose_step_mode("graph", 10, machine("cpu", num_processes))


@pytest.mark.parametrize(("triton", "compiler"), [(False, "gcc"), (True, None)])
def test_compile_is_refused_on_a_gpu_without_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str | None
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(step_mode, "has_triton", lambda: triton)
    monkeypatch.setattr(step_mode.shutil, "which", lambda name: name if name == compiler else None)
    with pytest.raises(ValueError, match="needs Triton and a C compiler on a GPU, got not both: pass --speed=auto"):
        choose_step_mode("compile", 10, machine("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can record")
def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speed graph must have a CUDA GPU"):
        Run(configure(tmp_path / "run", {**SMALL, "speed": "graph"}))
    assert not (tmp_path / "run").exists()


def test_a_run_says_how_it_is_run_and_why(tmp_path: Path) -> None:
    run = Run(configure(tmp_path / "run", {**SMALL, "speed": "plain", "steps": 1}))
    assert "\nspeed plain: as asked" in run.description
    run.train()


def test_a_recording_depends_on_shapes_and_plain_values() -> None:
    x, labels = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    assert recording_key(x) == recording_key(x + 1) != recording_key(x[:3])
    assert recording_key(labels) != recording_key(labels.int())
    assert (recording_key(None), recording_key(2)) == (None, 2)
    copies = clone_tensors((x, None, 2))
    assert copies[1:] == (None, 2)
    assert copies[0] is not x
    assert torch.equal(copies[0], x)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Let torch compile as in a new process, in any precision, and put its settings back."""
    for forget in (torch._dynamo.reset, torch._dynamo.utils.warn_once_cache.clear, forget_accelerators):
        forget()
    with torch._dynamo.config.patch(suppress_errors=False, cache_size_limit=8):
        yield
    torch._dynamo.reset()
    forget_accelerators()


def take_steps(mode: str, num: int, **options: Any) -> list[torch.Tensor]:
    """Return the network's parameters after so many steps in this mode."""
    config = configure(Path("nowhere"), {**SMALL, "speed": mode, **options})
    accelerator = make_accelerator(config)
    parts = build(config, accelerator.device)
    trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator).from_step()
    for _ in range(num):
        trainer.step([next(batches)])
    return [parameter.detach() for parameter in trainer.network.parameters()]


def compile_by(backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let networks that are compiled be so by this backend."""
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compile_(module, backend=backend, **options)
    )


@pytest.mark.usefixtures("dynamo")
def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def broken(*args: Any) -> None:
        tried.append(args)
        raise RuntimeError("no code can be made here")

    compile_by(broken, monkeypatch)
    torch.testing.assert_close(take_steps("compile", 3), take_steps("plain", 3), rtol=0, atol=0)
    assert tried


@dataclass
class Compiled:
    """What was compiled, and how often it was run."""

    inputs: list[Sequence[Any]] = field(default_factory=list)  # of each graph
    num_runs: int = 0


@pytest.fixture
def compiled(dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Let networks be compiled into code that counts its calls."""
    found = Compiled()

    def keep(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.inputs.append(example_inputs)

        def run(*args: Any) -> Any:
            found.num_runs += 1
            return graph.forward(*args)

        return run

    compile_by(keep, monkeypatch)
    return found


IN_BF16 = {"precision": "bf16", "network.multipliers": [1, 2]}  # where upsampling asks for torch's version


def test_a_network_is_compiled_whole_and_without_a_warning(
    compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    take_steps("compile", 1, **IN_BF16)
    assert (len(compiled.inputs), compiled.num_runs) == (1, 1)
    assert "WON'T CONVERT" not in caplog.text


def test_every_network_of_a_process_is_compiled_and_those_alike_once(compiled: Compiled) -> None:
    for seed in range(10):  # more than torch would compile
        take_steps("compile", 1, **IN_BF16, seed=seed)
    assert compiled.num_runs == 10
    assert len(compiled.inputs) == 1 or torch.__version__ < (2, 11)  # torch 2.6 tells their attention apart


def test_each_batch_size_has_code_of_its_own(compiled: Compiled) -> None:
    for batch_size in (16, 24):
        take_steps("compile", 1, **IN_BF16, batch_size=batch_size)
    assert compiled.num_runs == len(compiled.inputs) == 2
    assert not any(isinstance(value, torch.SymInt) for inputs in compiled.inputs for value in inputs)
