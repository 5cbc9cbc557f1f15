"""`python -m kairostep.doctor`: what is installed here, on which devices it runs, and what stands in its way.

Reads the metadata of packages and imports none of them but torch. Ends with 0, or with 1 where something is wrong;
an extra that is not installed is not.
"""

import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch

from kairostep import __version__
from kairostep.installation import install_command

SECONDS = 120  # for torchvision to load in a process of its own; torch alone may take many on a cold disk
BESIDE = ("lightning", "pytorch-lightning", "torchvision", "torchaudio", "transformers")  # no extra asks for them
WIDTH = 110  # of a line
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<of>[^\]]*)\])?\s*\(?(?P<bounds>[^;)]*)\)?\s*(?:;.*extra\s*==\s*['\"](?P<extra>[^'\"]+))?"
)


@dataclass(frozen=True)
class Requirement:
    """One package that kairostep, or one of its extras, asks for."""

    name: str
    at_least: str  # "" for any version
    extra: str  # "" for kairostep itself
    of: tuple[str, ...]  # extras of the package that are asked for

    @property
    def installed(self) -> str | None:
        """The version that is installed, or None."""
        return version_of(self.name)

    @property
    def too_old(self) -> bool:
        """Whether it is installed in a version below the one that is asked for."""
        return self.installed is not None and release(self.installed) < release(self.at_least)


@dataclass(frozen=True)
class Findings:
    """Lines to print, and what is wrong among them."""

    lines: list[str]
    problems: list[str]


def version_of(package: str) -> str | None:
    """Return the version that is installed, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def requirement(text: str) -> Requirement:
    """Return one line of a package's metadata, such as `numpy>=2.0; extra == "train"`, in its parts."""
    found = REQUIREMENT.match(text)
    assert found is not None, text
    at_least = re.search(r">=\s*([\w.]+)", found["bounds"])
    of = tuple(part.strip() for part in (found["of"] or "").split(",") if part.strip())
    return Requirement(found["name"], at_least[1] if at_least else "", found["extra"] or "", of)


def of_extra(extra: str, requirements: list[Requirement]) -> list[Requirement]:
    """Return what an extra brings, those of our other extras that it names included."""
    own = [item for item in requirements if item.extra == extra]
    named = [name for item in own if item.name == "kairostep" for name in item.of]
    return [item for item in own if item.name != "kairostep"] + [
        item for name in named for item in of_extra(name, requirements)
    ]


def versions(requirements: Iterable[Requirement]) -> Findings:
    """Return the versions of Python, torch and kairostep, and which of them is too old."""
    needs = next((item.at_least for item in requirements if item.name == "torch" and not item.extra), "")
    lines = [
        f"kairostep {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"torch {torch.__version__}" + (f" (needs {needs} or newer)" if needs else ""),
    ]
    old = release(torch.__version__) < release(needs)
    return Findings(lines, [f"torch {torch.__version__} is older than {needs}: pip install 'torch>={needs}'"] * old)


def runs_bfloat16(device: str) -> bool:
    """Return whether a product of matrices in bfloat16 runs there, in hardware on a CUDA device."""
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


def extras(requirements: list[Requirement]) -> Findings:
    """Return a line for each extra, with what it lacks and the line that brings it."""
    lines, problems = [], []
    for extra in sorted({item.extra for item in requirements} - {""}):
        wanted = of_extra(extra, requirements)
        missing = sorted({item.name for item in wanted if item.installed is None})
        old = [item for item in wanted if item.too_old]
        fix = install_command(extra, upgrade=bool(old))
        problems += [f"{item.name} {item.installed} is older than {item.at_least}: {fix}" for item in old]
        lacks = ", ".join([*missing, *(f"{item.name}>={item.at_least}" for item in old)])
        lines.append(f"{extra:7} lacks {lacks}: {fix}" if lacks else f"{extra:7} installed")
    if not lines:
        how = install_command("train")
        lines.append(f"unknown: kairostep is not installed but read from its source; {how} says more")
    return Findings(lines, list(dict.fromkeys(problems)))


def libraries(requirements: Iterable[Requirement]) -> list[str]:
    """Return the versions of what extras ask for and of what others bring beside it, some in a line."""
    names = sorted({item.name for item in requirements if item.extra and item.name != "kairostep"} | set(BESIDE))
    found = [f"{name} {version}" for name in names if (version := version_of(name))]
    return textwrap.wrap(", ".join(found), WIDTH, break_long_words=False, break_on_hyphens=False)


def torchvision_problems() -> list[str]:
    """Return whether a torchvision is there that does not load.

    It is tried in a process of its own: one built for another torch may end the process that imports it.
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
    """Return why a module cannot be imported in a fresh process with our path, in one line; None where it can."""
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
    """Print all of it and return 1 where something is wrong, else 0."""
    requirements = [requirement(text) for text in requirements_of("kairostep")]
    head, wanted = versions(requirements), extras(requirements)
    problems = [*head.problems, *wanted.problems, *torchvision_problems()]
    sections = {"Devices": devices(), "Extras": wanted.lines, "Libraries": libraries(requirements)}
    print("\n".join(head.lines))
    for title, lines in {**sections, "Problems": problems}.items():
        print("\n".join(["", title, *(f"  {line}" for line in lines or ["none"])]))
    return 1 if problems else 0


def requirements_of(package: str) -> list[str]:
    """Return what an installed package asks for, nothing where it is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main())
