"""Hints to install something name a command that works where kairostep came from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kairostep import installation
from kairostep.installation import install_command, missing, package_of

ROOT = Path(__file__).parents[1]


class Distribution:
    """What pip notes of an installed package."""

    def __init__(self, noted: dict[str, Any] | None) -> None:
        self.noted = noted

    def read_text(self, name: str) -> str | None:
        """Return the content of one of its files."""
        assert name == "direct_url.json"
        return None if self.noted is None else json.dumps(self.noted)


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'kairostep[train]'"),
        ({"url": "file:///home/me/kairostep", "dir_info": {}}, "pip install '/home/me/kairostep[train]'"),
        (
            {"url": "file:///tmp/k-0.1.whl", "archive_info": {}},
            "pip install 'kairostep[train] @ file:///tmp/k-0.1.whl'",
        ),
        (
            {"url": "https://example.org/k.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'kairostep[train] @ git+https://example.org/k.git@abc'",
        ),
    ],
)
def test_an_installed_package_is_extended_from_where_it_came(
    noted: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "source_tree", lambda: None)
    monkeypatch.setattr(installation.metadata, "distribution", lambda name: Distribution(noted))
    assert install_command("train") == command


def test_code_in_its_source_tree_is_installed_from_there() -> None:
    assert installation.source_tree() == ROOT
    assert install_command("report") == f"pip install --editable '{ROOT}[report]'"
    assert install_command("eval", upgrade=True) == f"pip install --upgrade --editable '{ROOT}[eval]'"


def test_packages_have_the_names_that_pip_knows() -> None:
    assert [package_of(name) for name in ("yaml", "PIL.Image", "sklearn.datasets", "tqdm", None)] == [
        "pyyaml",
        "pillow",
        "scikit-learn",
        "tqdm",
        "None",
    ]
    error = missing("the digits set", ModuleNotFoundError("no", name="sklearn.datasets"), "train")
    assert str(error).startswith("the digits set needs scikit-learn, which is not installed: pip install ")
    assert error.name == "sklearn.datasets"


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


WITHOUT_NUMPY = """
import sys, torch
sys.modules["numpy"] = None
for name in [name for name in sys.modules if name.startswith("numpy.")]:
    del sys.modules[name]
import kairostep.data
"""


def test_importing_data_without_its_extra_names_it() -> None:
    done = run_python(WITHOUT_NUMPY)
    expected = f"kairostep.data needs numpy, which is not installed: pip install --editable '{ROOT}[train]'"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {expected}"


LACKING = """
import json, sys
from kairostep.cli import main
for lacking, command in json.loads(sys.argv[1]):
    before = {name: sys.modules.get(name) for name in lacking}
    sys.modules.update(dict.fromkeys(lacking))
    try:
        main(command)
    except SystemExit as ended:
        assert ended.code == 1, ended.code
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
"""
EVERYTHING = [
    "numpy",
    "yaml",
    "diffusers",
    "accelerate",
    "safetensors",
    "PIL",
    "sklearn",
    "tqdm",
    "jinja2",
    "plotly",
    "matplotlib",
]
CASES = [
    ("yaml", ["report", "."], "pyyaml", "report"),
    ("plotly", ["report", "."], "plotly", "report"),
    ("yaml", ["preview"], "pyyaml", "train"),
    ("jinja2", ["preview", "--output", "x.html"], "jinja2", "report"),
    ("matplotlib", ["preview", "--output", "x.png"], "matplotlib", "report"),
    ("accelerate", ["generate", "run"], "accelerate", "train"),
    ("safetensors", ["evaluate", "run"], "safetensors", "eval"),
    ("diffusers", ["train", "digits"], "diffusers", "train"),
]


def test_a_command_names_its_own_extra_and_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_python(LACKING, json.dumps([([lacking], command) for lacking, command, *_ in CASES]))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("kairostep: error: ")]
    assert said == [
        f"kairostep: error: kairostep {command[0]} needs {package}, which is not installed: {install_command(extra)}"
        for _, command, package, extra in CASES
    ]


def test_presets_need_torch_alone() -> None:
    done = run_python(LACKING, json.dumps([(EVERYTHING, ["presets"])]))
    assert done.stderr == ""
    assert done.stdout.startswith("digits ")


LOADED = """
import json, sys
import torch
before = set(sys.modules)
from kairostep.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as ended:
        assert command == ["doctor"] or ended.code == 0, command  # there may be something wrong here
print("\\n" + json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
SLOW = {"accelerate", "diffusers", "huggingface_hub", "pandas", "scipy", "sklearn", "tensorboard", "torchvision"}
SLOW |= {"transformers"}


def test_commands_without_training_import_nothing_that_takes_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\nprovenance: {kairostep: 0.1.0}\n")
    monkeypatch.chdir(tmp_path)
    commands = [
        ["presets"],
        ["preview"],
        ["preview", "--output", "seen.png"],
        ["report", "run"],
        ["doctor"],
        ["--help"],
    ]
    done = run_python(LOADED, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "kairostep" in loaded
    assert loaded & SLOW == set()
