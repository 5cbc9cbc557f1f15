"""Runs that begin with the weights of another: which weights these are, and what is refused."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from small_runs import SMALL, assert_same_state, configure, same_bits, state_of, train_here

import kairostep.cli
from kairostep.training import Run

BASE = {**SMALL, "steps": 14}
FINE = {**SMALL, "steps": 9, "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("initial") / "base"
    train_here(directory, BASE)
    return directory


def begun(directory: Path, source: Path, **more: str) -> Run:
    """Return a run that has not taken a step, its directory free for others."""
    run = Run(configure(directory, {**FINE, "initial_weights": source, **more}))
    assert run.lock is not None
    run.lock.release()
    return run


def test_a_run_gives_its_averaged_weights_in_every_form(base: Path, tmp_path: Path) -> None:
    expected = state_of(base)["trainer"]["ema"]["model"]
    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, file)
    for number, source in enumerate((base, base / "model", base / "model" / "unet", file)):
        trainer = begun(tmp_path / str(number), source).trainer
        for found in (trainer.network.state_dict(), trainer.ema.model.state_dict()):
            assert found.keys() == expected.keys()
            assert all(same_bits(found[name], expected[name]) for name in expected), source


def test_training_starts_where_the_other_run_ended(base: Path, tmp_path: Path) -> None:
    fresh, fine = train_here(tmp_path / "fresh", FINE), train_here(tmp_path / "fine", {**FINE, "initial_weights": base})
    assert fine.monitor.evaluate()["loss"] < 0.9 * fresh.monitor.evaluate()["loss"]
    (note,) = (note for note in begun(tmp_path / "said", base).notes if "begins with" in note)
    assert note.startswith(f"training begins with the weights of {base}")


def test_weights_that_predict_something_else_get_a_note(base: Path, tmp_path: Path) -> None:
    assert not any("has to learn first" in note for note in begun(tmp_path / "linear", base).notes)
    notes = begun(tmp_path / "flow", base, process="flow").notes
    note = next(note for note in notes if "which it has to learn first" in note)
    assert note.startswith(f"the weights of {base} predict epsilon under linear, this run trains velocity under flow")
    assert note.endswith("pass --process=linear --prediction=epsilon to train on what they know")


def test_it_goes_on_without_the_weights_it_began_with(base: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(base, source)
    settings = {**FINE, "initial_weights": source}
    whole = train_here(tmp_path / "whole", settings).directory
    train_here(tmp_path / "parts", {**settings, "steps": 7})
    shutil.rmtree(source)
    train_here(tmp_path / "parts", settings)
    assert_same_state(state_of(tmp_path / "parts")["trainer"], state_of(whole)["trainer"])


def test_weights_of_another_network_are_refused(base: Path, tmp_path: Path) -> None:
    settings = {**FINE, "initial_weights": base}
    with pytest.raises(
        ValueError, match=r"initial_weights must be of the network that is trained.*of shape \(8, .*--network"
    ):
        Run(configure(tmp_path / "wider", {**settings, "network.channels": 16}))
    with pytest.raises(ValueError, match=r"which lacks [1-9]\d* of \d+ tensors and has 0 others, such as"):
        Run(configure(tmp_path / "labels", {**settings, "label_dropout": 0.1}))


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    for name, said in (
        ("nowhere", "must be a run directory, a folder with diffusion_pytorch_model.safetensors or a safetensors file"),
        ("empty", "must be a run directory"),
        ("broken.safetensors", "must be a readable safetensors file"),
    ):
        with pytest.raises(ValueError, match=f"initial_weights {said}"):
            Run(configure(tmp_path / "run", {**FINE, "initial_weights": tmp_path / name}))


def test_arms_share_the_weights_they_begin_with(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = f"uniform,uniform --initial_weights={base}"
    with pytest.raises(SystemExit):
        kairostep.cli.main(["compare", "digits", "--arms", arms, "--output", str(tmp_path / "compared")])
    assert "arms must share data, network, process and measurements" in capsys.readouterr().err
