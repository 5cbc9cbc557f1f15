"""A checkpoint is written whole or not at all, read as it was written, and believed only if every bit is right."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_runs import assert_same_state, hidden_files

from kairostep.runs import CheckpointError, Checkpoints
from kairostep.runs.checkpoint import read, read_facts, write

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
DTYPES += [torch.bool, torch.float8_e4m3fn]


def nested_state() -> dict[str, Any]:
    shared = torch.arange(12, dtype=torch.float32)
    return {
        "dtypes": {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(24).view(2, 3, 4).transpose(0, 2)[::2],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 3),
        "shared": [shared, shared, shared[3:7], shared.view(3, 4)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "state": {0: {"step": torch.tensor(1.0)}, 1: {"step": None}, -7: []},
        "numbers": [0.1, 1e-300, -0.0, 2**63 + 1, -(2**80), float("inf"), True, False, None],
        "texts": ["", "ünï", 'quotes " and \\ and \n', "tensor", "mapping"],
        "tensor": {"tensor": "tensor"},
        "mapping": {"list": [[], {}, [[torch.tensor(2)]]]},
        None: 1,
        # names that meet when keys are joined
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "one": {1: torch.tensor([3]), "1": torch.tensor([4])},
    }


def test_nested_states_come_back_bit_by_bit(tmp_path: Path) -> None:
    state = nested_state()
    write(tmp_path / "a.safetensors", state, {"step": 3})
    assert_same_state(read(tmp_path / "a.safetensors"), state)
    assert read_facts(tmp_path / "a.safetensors") == {"step": 3}


def test_what_is_read_shares_no_memory_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.ones(1000)}, {})
    state = read(path)
    write(path, {"x": torch.zeros(1000)}, {})
    path.unlink()
    assert torch.equal(state["x"], torch.ones(1000))


def test_an_optimizer_goes_on_from_a_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    write(tmp_path / "a.safetensors", optimizer.state_dict(), {})
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(read(tmp_path / "a.safetensors"))
    assert_same_state(other.state_dict(), optimizer.state_dict())


def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(tmp_path / "a.safetensors", {"x": torch.ones(2), "y": object()}, {})
    assert list(tmp_path.iterdir()) == []


# Written whole or not at all


def half_written(tensors: Any, path: Path, metadata: Any) -> None:
    save_file(tensors, path, metadata)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    raise OSError(28, "No space left on device")


def nothing_synced(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("place", "fault"), [("save_file", half_written), ("os.fsync", nothing_synced)])
def test_a_failing_writer_leaves_the_previous_file(
    place: str, fault: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = checkpoints.save(5, {"x": torch.ones(100)}, {})
    before = path.read_bytes()
    monkeypatch.setattr(f"kairostep.runs.checkpoint.{place}", fault)
    for step in (5, 6):
        with pytest.raises(OSError, match=r"No space|Input/output"):
            checkpoints.save(step, {"x": torch.zeros(100)}, {})
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000005.safetensors"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for name in (".step-00000003.safetensors", ".tmpA1b2C3"):  # ours, and safetensors' own
        (tmp_path / name).write_bytes(b"half")
    checkpoints.save(5, {"x": torch.ones(1)}, {})
    assert hidden_files(tmp_path) == []
    assert len(checkpoints.paths()) == 1


# The last and the best


def names(checkpoints: Checkpoints) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in checkpoints.paths()]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_and_the_best_are_kept_and_nothing_else(keep: int, tmp_path: Path) -> None:
    chance = random.Random(keep)
    checkpoints = Checkpoints(tmp_path, keep)
    losses: dict[int, float | None] = {}
    for step in range(1, 30):
        losses[step] = chance.choice([None, float("nan"), chance.random(), chance.random(), chance.random()])
        checkpoints.save(step, {"step": step}, {"held_out": losses[step]})
        ranked = {k: value for k, value in losses.items() if value is not None and value == value}
        best = {min(ranked, key=ranked.__getitem__)} if ranked else set()
        assert set(names(checkpoints)) == set(sorted(losses)[-keep:]) | best
        assert {int(read(path)["step"]) for path in checkpoints.paths()} == set(names(checkpoints))


def test_a_save_survives_a_later_checkpoint_that_could_not_be_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(20, {"step": 20}, {})
    (tmp_path / "step-00000020.safetensors").write_bytes(b"damaged")
    path = checkpoints.save(10, {"step": 10}, {})  # the run had to go back
    assert path.exists()
    assert read(checkpoints.paths()[-1]) == {"step": 10}


def test_a_damaged_checkpoint_does_not_stop_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    first = checkpoints.save(1, {"x": torch.ones(3)}, {"held_out": 0.5})
    content = first.read_bytes()
    assert content.count(b"held_out") == 1
    first.write_bytes(content.replace(b'\\"held_out\\"', b'\\"held_out  '))  # no longer JSON
    with pytest.raises(CheckpointError, match=first.name):
        read_facts(first)
    checkpoints.save(2, {"x": torch.ones(3)}, {"held_out": 0.6})
    assert names(checkpoints) == [1, 2]


# Damage


def small_checkpoint(path: Path) -> dict[str, Any]:
    state = {"x": torch.randn(40), "y": {"z": torch.arange(9)}, "n": 12345.678, "text": "abc"}
    write(path, state, {"step": 1, "held_out": 0.25})
    return state


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.safetensors"
    state = small_checkpoint(path)
    content = path.read_bytes()
    chance = random.Random(0)
    header = int.from_bytes(content[:8], "little") + 8
    positions = [0, 1, 7, 8, 9, header - 1, header, len(content) - 1]
    positions += chance.sample(range(8, header), 60) + chance.sample(range(header, len(content)), 40)
    unnoticed, messages = [], []
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            assert_same_state(read(path), state)  # a flipped bit may leave white space
            unnoticed.append(position)
        except CheckpointError as error:
            messages.append(str(error))
    assert all(position < header for position in unnoticed)
    assert len(unnoticed) <= 5
    assert all(str(path) in message for message in messages)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.safetensors"
    small_checkpoint(path)
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=path.name):
            read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match=path.name):
        read(path)


class Surprise:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_pickles_are_refused_unopened(form: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "step-00000001.safetensors", tmp_path / "trace"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Surprise(trace)))
    else:
        torch.save(Surprise(trace), path)
    with pytest.raises(CheckpointError, match=path.name):
        read(path)
    assert not trace.exists()


def test_tensors_of_somebody_else_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of kairostep: it lacks facts, sha256, state"):
        read(tmp_path / "x.safetensors")
    text = {"state": json.dumps({"tensor": ".x"}), "facts": "{}", "sha256": "0" * 64}
    save_file({".x": torch.ones(2)}, tmp_path / "y.safetensors", text)
    with pytest.raises(CheckpointError, match="SHA-256"):
        read(tmp_path / "y.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors"):
        read(tmp_path / "nothing.safetensors")


# A folder that others change


def test_checkpoints_removed_while_they_are_pruned_do_not_stop_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, {"x": torch.ones(2)}, {"held_out": 1.0})
    monkeypatch.setattr(Checkpoints, "best", lambda self: shutil.rmtree(self.directory))
    checkpoints.save(2, {"x": torch.ones(2)}, {"held_out": 2.0})
    monkeypatch.undo()
    assert checkpoints.paths() == []
    assert checkpoints.best() is None
    path = checkpoints.save(3, {"x": torch.ones(2)}, {"held_out": 3.0})
    assert checkpoints.paths() == [path]


def test_a_folder_removed_while_it_is_listed_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def glob(*_: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "glob", glob)
    assert Checkpoints(tmp_path, keep=1).paths() == []


def test_a_directory_in_the_place_of_a_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    directory = tmp_path / "step-00000001.safetensors"
    directory.mkdir()
    (tmp_path / "step-last.safetensors").touch()  # somebody else's
    path = checkpoints.save(2, {"x": torch.ones(2)}, {"held_out": 2.0})
    assert checkpoints.paths() == [directory, path]
    assert checkpoints.best() == path
    for reader in (read, read_facts):
        with pytest.raises(CheckpointError, match="is damaged: it must be a file, and is a directory"):
            reader(directory)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (99_999_999, 100_000_000):
        checkpoints.save(step, {"x": torch.ones(2)}, {})
    assert [path.stem for path in checkpoints.paths()] == ["step-99999999", "step-100000000"]


@pytest.mark.parametrize("facts", ["[]", '{"held_out": "low"}', "{", "[" * 100_000])
def test_facts_that_are_none_are_passed_over(facts: str, tmp_path: Path) -> None:
    header = {"state": "{}", "facts": facts, "sha256": ""}
    save_file({"x": torch.ones(2)}, tmp_path / "step-00000001.safetensors", metadata=header)
    assert Checkpoints(tmp_path, keep=1).best() is None
