"""A file is whole or not there, and what was there before stays until then."""

import os
from pathlib import Path

import pytest

from kairostep.files import whole_file


def write_half(path: Path) -> None:
    path.write_text("ne")
    raise ZeroDivisionError


def test_the_file_appears_whole_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_that_fails_leaves_what_was_there_and_nothing_else(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(path, shared=shared) as temporary:
        write_half(temporary)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file.txt", []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with whole_file(path) as temporary:
        temporary.write_text("content")
    assert synced == [(len("content"), False)]


def test_a_disk_that_fails_at_the_last_moment_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), whole_file(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_shared_file_do_not_share_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    with whole_file(path, shared=True) as first:
        monkeypatch.setattr(os, "getpid", lambda: -1)  # as another process would
        with whole_file(path, shared=True) as second:
            assert first != second
            second.write_text("second")
        first.write_text("first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
