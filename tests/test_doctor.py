"""The doctor: versions, devices, extras, and a torchvision that does not load, each branch of them."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import kairostep as ks
from kairostep import doctor
from kairostep.installation import install_command

ROOT = Path(__file__).parents[1]
BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")'


def install(folder: Path, name: str, version: str, requires: Sequence[str] = (), extras: Sequence[str] = ()) -> None:
    """Write the metadata that pip leaves of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [*(f"Requires-Dist: {line}" for line in requires), *(f"Provides-Extra: {extra}" for extra in extras)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines]))


def write_module(folder: Path, name: str, code: str) -> None:
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)


def diagnosis(folder: Path) -> subprocess.CompletedProcess[str]:
    """Return what the command prints where these packages come first on the path."""
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    command = [sys.executable, "-m", "kairostep.doctor"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def own_requirements() -> list[str]:
    """Return what pyproject.toml asks for, as pip would write it down."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return project["dependencies"] + [f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines]


def test_the_command_tells_versions_devices_and_extras(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requires = [*own_requirements(), 'nowhere-to-be-found>=1; extra == "train"']
    install(tmp_path, "kairostep", ks.__version__, requires, list(project["optional-dependencies"]))
    done = diagnosis(tmp_path)
    assert done.stderr == ""
    head, devices, *rest = done.stdout.split("\n\n")
    assert head.startswith(f"kairostep {ks.__version__}, Python 3.")
    assert f"torch {torch.__version__} (needs >=2.6)" in head
    assert devices.splitlines()[0] == "Devices"
    assert any(line.startswith("  cpu ") and "bf16 yes" in line for line in devices.splitlines())
    extras = rest[0].splitlines()
    assert [line.split()[0] for line in extras[1:]] == sorted(project["optional-dependencies"])
    assert any("nowhere-to-be-found" in line and install_command("train") in line for line in extras)
    assert rest[-1].startswith("Problems")
    assert done.returncode == (0 if "  none" in rest[-1] else 1)


def test_a_broken_torchvision_is_named_with_its_reason_and_the_way_out(tmp_path: Path) -> None:
    write_module(tmp_path, "torchvision", BROKEN)
    install(tmp_path, "torchvision", "0.21.0")
    done = diagnosis(tmp_path)
    assert done.returncode == 1
    assert f"torchvision 0.21.0 does not load beside torch {torch.__version__}" in done.stdout
    assert "(RuntimeError: operator torchvision::nms does not exist)" in done.stdout
    assert "pip uninstall torchvision" in done.stdout


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os; os.abort()", "it ended with code -6"),
        ("import time; time.sleep(60)", "still loading after 0.5 seconds"),
        (BROKEN, "RuntimeError: operator torchvision::nms does not exist"),
    ],
)
def test_whatever_torchvision_does_the_doctor_survives_it(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "torchvision", code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "SECONDS", 0.5 if "sleep" in code else 60)
    assert any(reason in problem for problem in doctor.torchvision_problems())


def test_a_torchvision_that_loads_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "torchvision", "")
    install(tmp_path, "torchvision", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert "torchvision 0.99.0" in ", ".join(doctor.libraries([]))
    assert doctor.torchvision_problems() == []


def test_without_torchvision_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "failure_of_import", lambda module: pytest.fail("tried to import it"))
    assert doctor.torchvision_problems() == []


def test_extras_are_complete_or_lack_something_or_are_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "here-and-new", "2.10.1")
    install(tmp_path, "here-but-old", "1.9.3rc1")
    monkeypatch.syspath_prepend(tmp_path)
    lines = ["torch>=2.6", 'here-and-new>=2.9; extra == "full"', 'nowhere-to-be-found; extra == "lacking"']
    lines += ['here-but-old>=1.10; extra == "old"', "kairostep[full,old]; extra == 'all'"]
    lines += ['nowhere-to-be-found; python_version < "3" and extra == "full"']
    found = doctor.extras(["full", "lacking", "old", "all"], [Requirement(line) for line in lines])
    assert found.lines == [
        f"all     lacks here-but-old>=1.10: {install_command('all', upgrade=True)}",
        "full    installed",
        f"lacking lacks nowhere-to-be-found: {install_command('lacking')}",
        f"old     lacks here-but-old>=1.10: {install_command('old', upgrade=True)}",
    ]
    assert "here-and-new 2.10.1" in ", ".join(doctor.libraries(map(Requirement, lines)))
    assert len(found.problems) == 2
    assert all(problem.startswith("here-but-old 1.9.3rc1 is not >=1.10: ") for problem in found.problems)


def test_without_an_installed_kairostep_extras_are_unknown() -> None:
    assert doctor.requirements_of("nowhere-to-be-found") == ([], [])
    found = doctor.extras([], [])
    assert found.problems == []
    assert "kairostep is not installed but read from its source" in found.lines[0]


def test_without_packaging_extras_are_unknown_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("packaging", "packaging.requirements", "packaging.version"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(doctor, "torchvision_problems", list)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert f"unknown: telling them needs packaging; {install_command('train')} brings it" in printed
    assert f"torch {torch.__version__}\n" in printed


@pytest.mark.parametrize(
    ("installed", "old"),
    [("2.5.1+cu124", True), ("2.6.0", False), ("2.13.0+cpu", False), ("2.6.0a0+git1234", False), ("unknown", False)],
)
def test_a_torch_that_is_too_old_is_a_problem(installed: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: installed)
    problems = [f"torch {installed} is not >=2.6: pip install 'torch>=2.6'"] if old else []
    assert doctor.versions([Requirement("torch>=2.6")]).problems == problems


@pytest.mark.parametrize(
    ("bf16", "says"), [(True, "bf16 yes"), (False, "bf16 no: train with --precision=fp16 or fp32")]
)
def test_cuda_devices_have_a_line_each(bf16: bool, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    card = SimpleNamespace(name="A Card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert doctor.devices()[:2] == [f"cuda:{index}  A Card, 80 GiB, {says}" for index in range(2)]


@pytest.mark.parametrize(
    ("built", "says"), [("12.4", "though torch is built for 12.4: see nvidia-smi"), (None, "torch is built without it")]
)
def test_no_cuda_device_has_its_reason(built: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    assert doctor.devices()[0] == f"cuda    none, {says}"


def test_mps_says_whether_it_runs_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for runs, says in ((True, "yes"), (False, "no")):
        monkeypatch.setattr(doctor, "runs_bfloat16", lambda device, runs=runs: runs)
        assert f"mps     available, bf16 {says}" in doctor.devices()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "mps     none" in doctor.devices()


def test_a_device_without_bfloat16_is_found_by_trying() -> None:
    assert doctor.runs_bfloat16("cpu")
    assert not doctor.runs_bfloat16("no such device")


def test_problems_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "torchvision_problems", list)
    monkeypatch.setattr(doctor, "requirements_of", lambda package: ([], [Requirement("torch>=2.6")]))
    assert doctor.main() == 0
    assert capsys.readouterr().out.endswith("Problems\n  none\n")
    monkeypatch.setattr(doctor, "requirements_of", lambda package: ([], [Requirement("torch>=99.1")]))
    assert doctor.main() == 1
    assert "is not >=99.1" in capsys.readouterr().out
