"""kairostep patch: scripts of the shape of diffusers' basic-training tutorial, patched and run."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import forget_accelerators
from tutorial_scripts import CALL, HEAD, LAUNCH, LOOP, PARSER, RESUMABLE, SETUP, TUTORIAL

from kairostep.cli import main
from kairostep.integrations.diffusers_scripts import ScriptSampler
from kairostep.integrations.patching import patch_script


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    forget_accelerators()
    yield
    forget_accelerators()


def run(text: str, **settings: Any) -> dict[str, Any]:
    """Run a script as `python train.py` does, and return its variables, with the samplers that it made."""
    forget_accelerators()
    space: dict[str, Any] = {"__name__": "__main__", "SAMPLERS": [], "SETTINGS": settings}
    lines = [
        f"{line}\n    SAMPLERS.append(timestep_sampler)" if "= ScriptSampler(" in line else line
        for line in text.splitlines()
    ]
    exec(compile("\n".join(lines) + "\n", "train.py", "exec"), space)
    return space


def test_the_loop_without_a_parser_names_its_sampler() -> None:
    patched = patch_script(TUTORIAL)
    added = [line[1:].strip() for line in patched.diff.splitlines()[2:] if line.startswith("+")]
    assert added == [
        "from kairostep.integrations.diffusers_scripts import ScriptSampler",
        'timestep_sampler = ScriptSampler("root_loss", accelerator)',
        "timesteps = timestep_sampler.randint(",
        'loss = timestep_sampler.mean(F.mse_loss(noise_pred, noise, reduction="none"))',
        "with timestep_sampler.observe():",
        "optimizer.step()",
    ]
    assert not patched.has_argument
    assert 'ScriptSampler("uniform", accelerator)' in patch_script(TUTORIAL, "uniform").text


def test_it_runs_and_uniform_leaves_the_losses_of_the_original_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = run(TUTORIAL)
    drawn = iter(original["DRAWN"])

    def replay(self: ScriptSampler, *_: Any, **__: Any) -> torch.Tensor:
        self._draw(8)
        torch.randint(0, 1000, (8,))  # the original draws by torch's generator
        return next(drawn)

    monkeypatch.setattr(ScriptSampler, "randint", replay)
    patched = run(patch_script(TUTORIAL, "uniform").text)
    assert patched["LOSSES"] == original["LOSSES"]
    assert len(patched["LOSSES"]) == 2


def test_its_sampler_learns_from_each_step() -> None:
    text = patch_script(TUTORIAL).text
    (after_two,) = run(text)["SAMPLERS"]
    assert after_two.sampler.sampler.steps.num_steps == 2
    (sampler,) = run(text, num_epochs=150)["SAMPLERS"]
    density = sampler.sampler.density(20)
    assert density.max() > 1.2 * density.min()


def test_accumulated_batches_are_one_step_of_its_sampler() -> None:
    space = run(patch_script(TUTORIAL).text, train_batch_size=2, num_epochs=1, gradient_accumulation_steps=2)
    (sampler,) = space["SAMPLERS"]
    assert (len(space["DRAWN"]), sampler.sampler.sampler.steps.num_steps) == (4, 2)


def test_its_sampler_goes_on_from_a_checkpoint_of_the_script() -> None:
    patched = patch_script(RESUMABLE)
    assert not any("never calls" in note for note in patched.notes)
    whole = run(patched.text, num_epochs=130)
    assert Path("spots/state-110/timestep_sampler_0.pt").exists()
    resumed = run(patched.text, num_epochs=130, resume_from="spots/state-110")
    assert len(resumed["DRAWN"]) == 20
    assert all(map(torch.equal, whole["DRAWN"][110:], resumed["DRAWN"]))
    torch.testing.assert_close(resumed["LOSSES"], whole["LOSSES"][110:])
    (sampler,) = resumed["SAMPLERS"]
    assert sampler.sampler.sampler.steps.num_steps == 130
    assert sampler.sampler.density(20).std() > 0  # no longer uniform, so the draws needed the losses of the first run


def test_a_seed_that_the_loop_reads_is_that_of_the_sampler() -> None:
    text = TUTORIAL.replace("    global_step = 0\n", "    torch.manual_seed(config.seed)\n")
    text = text.replace("            global_step += 1\n", "")
    patched = patch_script(text).text
    assert 'ScriptSampler("root_loss", accelerator, seed=config.seed)\n' in patched
    draws = [run(patched, seed=seed)["DRAWN"][0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


PARSE = "args = parser.parse_args()\n"
FUNCTION = """import argparse


def read():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    return parser.parse_args()


args = read()
"""
TAKES_ARGS, GIVES_ARGS = LOOP.replace("(config,", "(args, config,"), CALL.replace("(config,", "(args, config,")
KNOW_ARGS = {
    "a parameter": HEAD + TAKES_ARGS + PARSER + PARSE + SETUP + GIVES_ARGS,
    "a keyword": HEAD + LOOP.replace("):", ", *, args):", 1) + PARSER + PARSE + SETUP + CALL[:-2] + ", args=args)\n",
    "a global": HEAD + LOOP + PARSER + PARSE + SETUP + CALL,
    "of known ones": HEAD + LOOP + PARSER + "args, others = parser.parse_known_args()\n" + SETUP + CALL,
    "of a function": HEAD + LOOP + FUNCTION + SETUP + CALL,
}
DO_WITHOUT = {
    "a tuple after them": HEAD + LOOP + PARSER + PARSE + SETUP + LAUNCH,
    "a tuple, a parser": HEAD + LOOP + PARSER + "settings = parser.parse_args()\n" + SETUP + LAUNCH,
    "a dict": HEAD + LOOP + PARSER + "args = vars(parser.parse_args())\n" + SETUP + CALL,
    "read by key": HEAD
    + TAKES_ARGS.replace("    global_step = 0\n", "    global_step = int(args['learning_rate'] < 0)\n")
    + PARSER
    + "args = vars(parser.parse_args())\n"
    + SETUP
    + GIVES_ARGS,
    "a dict of a function": HEAD
    + LOOP
    + FUNCTION.replace("return parser.parse_args()", "return vars(parser.parse_args())")
    + SETUP.replace("seed)", "seed + int(args['learning_rate']))", 1)
    + CALL,
    "many": HEAD + LOOP.replace("lr_scheduler):", "lr_scheduler, *args):", 1) + PARSER + PARSE + SETUP + CALL,
    "of the loop alone": HEAD
    + LOOP.replace("    global_step = 0\n", "    args = (config, model)\n    global_step = len(args)\n")
    + PARSER
    + PARSE
    + SETUP
    + CALL,
    "in a function": HEAD
    + LOOP
    + f"def start():\n    {PARSE}    return args\n\n\n"
    + PARSER
    + SETUP
    + "start()\n"
    + CALL,
    "no parser here": HEAD
    + LOOP.replace("    global_step = 0\n", "    global_step = args.first\n")
    + "class args:\n    first = 0\n\n\n"
    + SETUP
    + CALL,
}


@pytest.mark.parametrize("name", [*KNOW_ARGS, *DO_WITHOUT])
def test_only_what_parsed_the_arguments_is_asked_for_the_sampler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (KNOW_ARGS | DO_WITHOUT)[name]
    patched = patch_script(text)
    is_known = name in KNOW_ARGS
    assert patched.has_argument == is_known
    assert ("ScriptSampler(args.timestep_sampler, accelerator)" in patched.text) == is_known
    assert ('parser.add_argument("--timestep_sampler", ' in patched.text) == is_known
    assert ("the loop has no args of argparse" in " ".join(patched.notes)) != is_known
    if is_known:
        monkeypatch.setattr(sys, "argv", ["train.py", "--timestep_sampler=loss_second_moment"])
    (sampler,) = run(patched.text)["SAMPLERS"]
    assert type(sampler.sampler.sampler).__name__ == ("LossSecondMoment" if is_known else "RootLoss")


def test_an_import_after_the_training_is_no_place_for_ours() -> None:
    text = TUTORIAL.replace("from accelerate import Accelerator, notebook_launcher", "import accelerate")
    text = text.replace("Accelerator(\n", "accelerate.Accelerator(\n").replace("notebook_", "accelerate.notebook_")
    patched = patch_script(text + "from PIL import Image\n").text
    assert len(run(patched)["SAMPLERS"]) == 1


def test_the_command_says_where_the_name_stands(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(TUTORIAL)
    main(["patch", "train.py", "--check"])
    assert "is recognised; a patch changes 6 lines" in capsys.readouterr().out
    main(["patch", "train.py", "--sampler=uniform"])
    told = capsys.readouterr().out
    assert "lines changed\n" in told
    assert "--timestep_sampler" not in told
    assert "note: the loop has no args of argparse, so the sampler's name stands where the script calls" in told
    assert 'replace "uniform" there; "uniform" has the script\'s own density\n' in told
    assert "note: the script never calls accelerator.save_state(folder), so its sampler is not saved" in told
    with pytest.raises(SystemExit):
        main(["patch", "train.py"])
    assert "or write another name where it calls ScriptSampler" in capsys.readouterr().err
