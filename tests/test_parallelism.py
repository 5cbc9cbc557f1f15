"""Models that processes would split are refused before anything starts."""

from pathlib import Path

import pytest

from kairostep.cli import main
from kairostep.parallelism import REFUSED, REFUSED_TYPES, check_parallelism, launched


@pytest.mark.parametrize(("variable", "name"), REFUSED.items())
@pytest.mark.parametrize("command", ["train", "generate", "evaluate"])
def test_what_accelerate_was_told_is_refused(
    command: str,
    variable: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "true")
    arguments = ["digits", f"--output={tmp_path / 'run'}"] if command == "train" else [str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"every process must hold the whole model, got accelerate configured for {name}: launch with" in message
    assert "docs/several_gpus.md" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("distributed_type", REFUSED_TYPES)
def test_an_accelerator_of_such_a_type_is_refused(distributed_type: str) -> None:
    with pytest.raises(ValueError, match="every process must hold the whole model, got accelerate configured for"):
        check_parallelism(distributed_type)


@pytest.mark.parametrize("distributed_type", ["NO", "MULTI_CPU", "MULTI_GPU", None])
def test_whole_models_pass(distributed_type: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_parallelism(distributed_type)


@pytest.mark.parametrize(
    ("environment", "num_processes", "line"),
    [
        ({}, 1, "kairostep generate run"),
        ({"TORCHELASTIC_RUN_ID": "none"}, 1, "kairostep generate run"),
        ({}, 2, "accelerate launch --multi_gpu --num_processes 2 -m kairostep generate run"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"},
            2,
            "torchrun --standalone --nproc_per_node 2 -m kairostep generate run",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"},  # it uses torchrun
            2,
            "accelerate launch --multi_gpu --num_processes 2 -m kairostep generate run",
        ),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, 4, "the same command on every machine"),
    ],
)
def test_the_launcher_that_was_used_is_named(
    environment: dict[str, str], num_processes: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched("kairostep generate run", num_processes) == line
