"""What a person types, and what is said in return."""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from commands import python, refused

import kairostep
from kairostep.cli import main
from kairostep.data import cifar10_obtain
from kairostep.experiments import (
    PRESETS,
    Component,
    Config,
    preset,
)
from kairostep.installation import install_command

TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.blocks=1", "--network.attention=[]"]
SHORT = ["--steps=2", "--batch_size=4", "--held_out_images=8", "--sample_steps=2", "--workers=0", "--warmup_steps=0"]
QUICK = [*TINY, *SHORT]

pytestmark = pytest.mark.usefixtures("elsewhere")


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "argument COMMAND: invalid choice: 'trian' (choose from"),
        (["presets", "--all"], "unrecognized arguments: --all"),
        (["data"], "the following arguments are required: name, folder"),
        (["data", "mnist", "here"], "argument name: invalid choice: 'mnist' (choose from"),
        (["train", "--config"], "argument --config: expected one argument"),
        (["train"], "train takes a preset or --config FILE: `kairostep presets` lists the presets"),
        (["train", "digits", "--config=x.yaml"], "train takes a preset or --config FILE"),
        (["train", "digts"], "unknown preset digts: did you mean digits?"),
        (["train", "zzz"], "unknown preset zzz: valid are digits, digits-flow"),
        (["train", "digits", "more"], "settings must be written --key=value, got 'more'"),
        (["train", "digits", "--stesp=3"], "unknown key --stesp: did you mean --steps?"),
        (["train", "digits", "--steps"], "steps must be a whole number, got True"),
        (["train", "digits", "--steps=-1"], "steps must be a whole number of at least 1, got -1"),
        (["train", "digits", "--learning_rate=fast"], "learning_rate must be a number, got 'fast'"),
        (["train", "digits", "--lr=1e-3"], "unknown key --lr: valid are --data, "),
        (["train", "digits", "--ema=0.9"], "unknown key --ema: did you mean --ema_decay?"),
        (
            ["train", "digits", "--label_dropout=1"],
            "label_dropout must be in [0, 1), got 1.0: pass for instance label_",
        ),
        (
            ["data", "cifar10", "texts/key.yaml/x"],
            "folder must be one that can be written, got texts/key.yaml/x: Not a",
        ),
        (["evaluate", "nowhere", "--inception=no.pt"], "the Inception network must be a TorchScript file, got no"),
        (
            ["generate", "nowhere", "--sampler=heun"],
            "the solver is named by --solver, a sampler draws t in training: wri",
        ),
        (["doctor", "--all"], "unrecognized arguments: --all"),
        (["train", "digits", "--sampler=adaptve"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "digits", "--sampler", "adaptve"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "--sampler=adaptve", "digits"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "digits", "--sampler=adaptive", "--sampler.flor=1"], "unknown option of sampler adaptive: flor:"),
        (["train", "digits", "--sampler=beta"], "sampler beta needs a: pass --sampler.a=..."),
        (["train", "digits", "--batch_size=7", "--accumulate=2"], "batch_size must be a multiple of accumulate, got 7"),
        (["train", "digits", "--precision=fp16"], "precision fp16 needs a GPU, got a CPU: pass --precision=fp32"),
        (["train", "digits", "--sample_steps=2000"], "sample_steps must be at most the 1000 steps of the process"),
        (["train", "images", "--label_dropout=0.1"], "data images needs folder: pass --data.folder=..."),
        (["train", "images", "--data.folder=nowhere"], "folder must be an existing folder of images, got nowhere"),
        (["train", "images", "--data.folder=empty"], "folder must hold at least one image (.bmp"),
        (["train", "images", "--data.folder=texts"], "folder must hold at least one image (.bmp"),
        (["train", "cifar10-small"], "data cifar10 needs path: pass --data.path=..."),
        (["train", "cifar10-small", "--data.path=no.npz"], "path must be a file or a folder of CIFAR-10, got no.npz"),
        (["train", "fashion-mnist", "--data.folder=empty"], "the folder of Fashion-MNIST must hold train-images-idx3"),
        (["train", "digits", "--autoencoder=empty"], "the folder of an autoencoder must hold config.json, got empty"),
        (["train", "--config=missing.yaml"], "--config must be a readable YAML file, got 'missing.yaml'"),
        (["train", "--config=texts/list.yaml"], "--config must hold `key: value` lines, got"),
        (["train", "--config=texts/key.yaml"], "unknown key stesp: did you mean steps?"),
        (["train", "--config=texts/number.yaml"], "unknown key 1: valid are data"),
        (["train", "digits", "--trackers=nonsense"], "Unsupported logging capability: nonsense"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "texts"):
        (tmp_path / name).mkdir()
    for name, text in {"list": "- 1", "key": "stesp: 3", "number": "1: 2"}.items():
        (tmp_path / "texts" / f"{name}.yaml").write_text(text)
    assert refused(capsys, *arguments).startswith(message)


def test_yaml_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.yaml").write_text("steps: [")
    assert refused(capsys, "train", "--config=torn.yaml").startswith("--config must be a readable YAML file, got 'torn")


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_run_directory_that_cannot_be_made_is_told(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "file" in refused(capsys, "train", "digits", *QUICK, f"--output={output}")


# Help and lists


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--sampler=adaptive", "--help"])
    text = capsys.readouterr().out
    assert re.search(r"--sampler=adaptive: .*\bevery=40, .*policy=network", text)
    plain = replace(preset("digits"), sampler=Component("adaptive"), output="runs/digits-adaptive")
    for field in fields(Config):
        value = getattr(plain, field.name)
        assert f"  --{field.name}={getattr(value, 'name', value)} " in text
        assert field.metadata["help"] in text


def test_help_in_a_process_of_its_own_lists_every_part_and_its_options() -> None:
    text = python("-m", "kairostep", "train", "--help").stdout  # where nothing else has imported the parts
    assert "  --data: cifar10, digits, fashion_mnist, images\n" in text
    assert "  --network: dit, unet, uvit\n" in text
    assert "  --process: cosine, edm, flow, linear, quadratic, scaled_linear\n" in text
    assert re.search(r"  --weighting: .*\bmin_snr\b", text)
    assert re.search(r"  --sampler: .*\broot_loss\b", text)
    assert re.search(r"  --data=digits: .*\bflip=", text)
    assert re.search(r"  --network=unet: .*\bchannels=16, .*\bdropout=", text)
    assert re.search(r"  --process=linear: .*\bnum_steps=1000", text)
    other = python("-m", "kairostep", "train", "images", "--help").stdout
    assert re.search(r"  --data=images: folder=\.\.\., size=64", other)


@pytest.mark.parametrize("arguments", [["--help"], ["presets", "--help"], ["data", "--help"]])
def test_every_other_command_has_help_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kairostep")


def test_presets_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["presets"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(line.endswith(preset.text) for line, preset in zip(lines, PRESETS.values(), strict=True))


# Data


def test_data_prints_where_the_set_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kairostep.data.obtain_cifar10", lambda folder: folder / "cifar10.npz")
    main(["data", "cifar10", "here"])
    assert capsys.readouterr().out.endswith("--data.path=here/cifar10.npz\n")


def test_data_that_cannot_be_had_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(cifar10_obtain.urllib.request, "urlopen", offline)
    monkeypatch.setattr(cifar10_obtain.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["data", "cifar10", "here"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("kairostep: error: here/cifar10.npz must come from somewhere, but every way failed:\n")
    for part in ("there are none", "no route to host", "npm is not installed", "into here and try again"):
        assert part in message


# As processes


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(kairostep.__file__).parents[1])}
    for arguments in ("train --help", "generate --help", "presets"):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "kairostep", *arguments.split()]
        ended = subprocess.run(
            command, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
        )
        os.close(writer)
        assert ended.stderr == b""


def test_a_report_on_settings_that_cannot_be_read_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: [")
    with pytest.raises(SystemExit) as ended:
        main(["report", "run"])
    assert ended.value.code == 1
    assert re.search(
        r"run: config\.yaml cannot be read.*so that its settings are not on the page", capsys.readouterr().err
    )
    assert Path("report.html").is_file()


def test_a_real_process_is_refused_without_a_traceback() -> None:
    ended = python("-m", "kairostep", "train", "digits", "--sampler=adaptve")
    assert ended.returncode == 2
    assert ended.stderr == "kairostep: error: unknown sampler adaptve: did you mean adaptive?\n"
    assert ended.stdout == ""
    assert not list(Path().iterdir())


WITHOUT_EXTRA = """
import sys
import torch
before = set(sys.modules)
import kairostep
import kairostep.cli
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"kairostep"}, new

def code_of(*arguments):
    try:
        kairostep.cli.main(arguments)
    except SystemExit as ended:
        return ended.code

sys.modules["yaml"] = None
assert code_of("train", "--help") == code_of("train", "digits") == 1
del sys.modules["yaml"]
sys.modules["diffusers"] = None
assert code_of("train", "digits") == 1
"""


def test_without_the_extra_the_core_needs_torch_alone_and_commands_name_the_extra() -> None:
    ended = python("-c", WITHOUT_EXTRA)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    needed = "kairostep: error: kairostep train needs {}, which is not installed: " + install_command("train")
    assert lines == [needed.format("pyyaml")] * 2 + [needed.format("diffusers")]
    assert not list(Path().iterdir())
