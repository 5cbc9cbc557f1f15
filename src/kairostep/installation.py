"""Finds out how kairostep was installed, and the command that installs an extra in the same way."""

import json
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}  # module -> package if they differ


def install_command(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs an extra from where kairostep came: a source tree, an archive or an index."""
    options = "--upgrade " if upgrade else ""
    if tree := source_tree():
        return f"pip install {options}--editable '{tree}[{extra}]'"
    came_from = direct_url()
    if came_from.startswith("file://") and not came_from.endswith((".whl", ".zip", ".tar.gz")):
        return f"pip install {options}'{came_from.removeprefix('file://')}[{extra}]'"
    if came_from:
        return f"pip install {options}'kairostep[{extra}] @ {came_from}'"
    return f"pip install {options}'kairostep[{extra}]'"


def source_tree() -> Path | None:
    """Return the checkout of the running code, None if it is an installed package."""
    tree = Path(__file__).resolve().parents[2]
    return tree if (tree / "pyproject.toml").is_file() else None


def direct_url() -> str:
    """Return the folder, file or repository that pip installed from, empty for a package index."""
    try:
        noted = json.loads(metadata.distribution("kairostep").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, json.JSONDecodeError):
        return ""
    url = str(noted.get("url", ""))
    repository = noted.get("vcs_info")
    return f"{repository['vcs']}+{url}@{repository['commit_id']}" if repository else url


def package_of(module: str | None) -> str:
    """Return the name of the package that pip installs for a module."""
    top = str(module).partition(".")[0]
    return DISTRIBUTIONS.get(top, top)


def missing(what: str, error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error that says which package `what` needs and how to install it."""
    message = f"{what} needs {package_of(error.name)}, which is not installed: {install_command(extra)}"
    return ModuleNotFoundError(message, name=error.name)
