"""`python -m kairostep.doctor`: prints what is installed, on which devices it runs, and problems.

It reads the metadata of packages and imports only torch and packaging. Without packaging it cannot read extras. The
exit code is 1 if there is a problem, otherwise 0; an extra that is not installed is no problem.
"""

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kairostep.installation import install_command, package_of
from kairostep.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SECONDS = 120  # limit for importing torchvision in a separate process; importing torch is slow on a cold disk
BESIDE = ("lightning", "pytorch-lightning", "torchvision", "torchaudio", "transformers")  # in no extra
WIDTH = 110  # of a line


@dataclass(frozen=True)
class Findings:
    """Lines to print, and the problems among them."""

    lines: list[str]
    problems: list[str]


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_too_old(item: "Requirement") -> bool:
    """Return whether the installed version of a package does not meet its requirement.

    A pre-release counts as its release: 2.6.0a0+git as 2.6.0. A text that is no version is never too old.
    """
    from packaging.version import InvalidVersion, Version

    try:
        installed = Version(version_of(item.name) or "")
    except InvalidVersion:
        return False
    return not item.specifier.contains(installed.base_version)


def is_of(item: "Requirement", extra: str) -> bool:
    """Return whether a requirement belongs to an extra, or for "" to kairostep itself."""
    if item.marker is None:
        return extra == ""
    without = item.marker.evaluate({"extra": ""})
    return without if extra == "" else item.marker.evaluate({"extra": extra}) and not without


def of_extra(extra: str, requirements: "Iterable[Requirement]") -> "list[Requirement]":
    """Return the requirements of an extra, including those of the other extras that it names."""
    requirements = list(requirements)
    own = [item for item in requirements if is_of(item, extra)]
    named = [name for item in own if item.name == "kairostep" for name in sorted(item.extras)]
    return [item for item in own if item.name != "kairostep"] + [
        item for name in named for item in of_extra(name, requirements)
    ]


def versions(requirements: "Iterable[Requirement]") -> Findings:
    """Return the versions of Python, torch and kairostep, and whether torch is too old."""
    needed = next((item for item in requirements if item.name == "torch" and is_of(item, "")), None)
    lines = [
        f"kairostep {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"torch {torch.__version__}" + (f" (needs {needed.specifier})" if needed else ""),
    ]
    if needed is None or not is_too_old(needed):
        return Findings(lines, [])
    return Findings(lines, [f"torch {version_of('torch')} is not {needed.specifier}: pip install '{needed}'"])


def runs_bfloat16(device: str) -> bool:
    """Return whether a device multiplies matrices in bfloat16; on a CUDA device, in hardware."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        one = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return float((one @ one).sum()) == 8.0
    except (RuntimeError, TypeError):
        return False


def devices() -> list[str]:
    """Return a line for each kind of device: CUDA, MPS, CPU."""
    lines = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        seen = torch.cuda.get_device_properties(index)
        bf16 = "yes" if runs_bfloat16(f"cuda:{index}") else "no: train with --precision=fp16 or fp32"
        lines.append(f"cuda:{index}  {seen.name}, {seen.total_memory / 2**30:.0f} GiB, bf16 {bf16}")
    if not lines:
        built = torch.version.cuda or torch.version.hip
        why = f"though torch is built for {built}: see nvidia-smi" if built else "torch is built without it"
        lines.append(f"cuda    none, {why}")
    has_mps = torch.backends.mps.is_available()
    lines.append(f"mps     available, bf16 {'yes' if runs_bfloat16('mps') else 'no'}" if has_mps else "mps     none")
    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = "yes" if runs_bfloat16("cpu") else "no"
    return [*lines, f"cpu     {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}, bf16 {bf16}"]


def extras(names: Iterable[str], requirements: "Sequence[Requirement]") -> Findings:
    """Return a line for each extra, with the packages it lacks and the command that installs them."""
    lines, problems = [], []
    for extra in sorted(names):
        wanted = of_extra(extra, requirements)
        missing = sorted({item.name for item in wanted if version_of(item.name) is None})
        old = [item for item in wanted if is_too_old(item)]
        fix = install_command(extra, upgrade=bool(old))
        problems += [f"{item.name} {version_of(item.name)} is not {item.specifier}: {fix}" for item in old]
        lacks = ", ".join([*missing, *(f"{item.name}{item.specifier}" for item in old)])
        lines.append(f"{extra:7} lacks {lacks}: {fix}" if lacks else f"{extra:7} installed")
    if not lines:
        how = install_command("train")
        lines.append(f"unknown: kairostep is not installed but read from its source; {how} says more")
    return Findings(lines, list(dict.fromkeys(problems)))


def libraries(requirements: "Iterable[Requirement]") -> list[str]:
    """Return the versions of the packages in our extras and in `BESIDE`, several in a line."""
    asked = {item.name for item in requirements if not is_of(item, "") and item.name != "kairostep"}
    found = [f"{name} {version}" for name in sorted(asked | set(BESIDE)) if (version := version_of(name))]
    return textwrap.wrap(", ".join(found), WIDTH, break_long_words=False, break_on_hyphens=False)


def torchvision_problems() -> list[str]:
    """Return a problem if torchvision is installed but cannot be imported.

    It is imported in a separate process: one built for another torch may crash the process that imports it.
    """
    reason = None if find_spec("torchvision") is None else failure_of_import("torchvision")
    if reason is None:
        return []
    return [
        f"torchvision {version_of('torchvision') or 'of unknown version'} does not load beside torch "
        f"{torch.__version__} ({reason}), and diffusers, transformers and torchmetrics fail with it: "
        "pip uninstall torchvision, or install the one made for this torch"
    ]


def failure_of_import(module: str) -> str | None:
    """Return in one line why a fresh process with our path cannot import a module, None if it can."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, env=environment, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"still loading after {SECONDS} seconds"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1].strip() if said else f"it ended with code {done.returncode}"


def main() -> int:
    """Print everything and return 1 if there is a problem, otherwise 0."""
    try:
        names, requirements = requirements_of("kairostep")
        wanted = extras(names, requirements)
    except ModuleNotFoundError as error:
        requirements = []
        wanted = Findings(
            [f"unknown: telling them needs {package_of(error.name)}; {install_command('train')} brings it"], []
        )
    head = versions(requirements)
    problems = [*head.problems, *wanted.problems, *torchvision_problems()]
    sections = {"Devices": devices(), "Extras": wanted.lines, "Libraries": libraries(requirements)}
    print("\n".join(head.lines))
    for title, lines in {**sections, "Problems": problems}.items():
        print("\n".join(["", title, *(f"  {line}" for line in lines or ["none"])]))
    return 1 if problems else 0


def requirements_of(package: str) -> "tuple[list[str], list[Requirement]]":
    """Return the extras and the requirements of a package, both empty if it is not installed."""
    from packaging.requirements import Requirement

    try:
        found = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return [], []
    return found.get_all("Provides-Extra") or [], [Requirement(text) for text in metadata.requires(package) or []]


if __name__ == "__main__":
    sys.exit(main())
