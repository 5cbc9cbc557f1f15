"""A file is whole or not there, and what was there before stays until then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kairostep.files import one_at_a_time, whole_file


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


MAKE_ONCE = """
import sys, time
from pathlib import Path
from kairostep.files import one_at_a_time, whole_file

path = Path(sys.argv[1])
with one_at_a_time(path):
    if not path.exists():
        print("made", flush=True)
        time.sleep(0.3)  # so that the others wait
        with whole_file(path) as temporary:
            temporary.write_text("x")
"""


def test_processes_that_need_the_same_file_make_it_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    command = [sys.executable, "-c", MAKE_ONCE, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    told = [process.communicate(timeout=60)[0] for process in running]
    assert "".join(told) == "made\n"
    assert [process.returncode for process in running] == [0] * 6
    assert list(path.parent.iterdir()) == [path]


def test_a_process_that_dies_in_the_block_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    dying = "import os, sys\nfrom pathlib import Path\nfrom kairostep.files import one_at_a_time\n"
    dying += "one_at_a_time(Path(sys.argv[1])).__enter__()\nos.kill(os.getpid(), 9)\n"
    assert subprocess.run([sys.executable, "-c", dying, str(path)]).returncode == -9
    subprocess.run([sys.executable, "-c", MAKE_ONCE, str(path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == [path]


def test_where_there_can_be_no_lock_nothing_waits(tmp_path: Path) -> None:
    folder = tmp_path / "no_folder"
    folder.write_text("a file in its place")
    with one_at_a_time(folder / "file"):
        pass
    with pytest.raises(ZeroDivisionError), one_at_a_time(tmp_path / "file"):
        write_half(tmp_path / "half")
    assert {path.name for path in tmp_path.iterdir()} == {"no_folder", "half"}
