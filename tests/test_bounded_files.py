"""Files are read if they are of the right kind and end; all others are refused at once, with the reason."""

import json
import os
import time
from pathlib import Path

import pytest

from kairostep.bounded_files import MAX_LINE, MAX_YAML, Unreadable, line_chunks, parse_yaml, read_bytes, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-3", {"a": 0.001}),
        ("a: &x [1, 2]\nb: *x\nc: {<<: {d: 3}, e: *x}", {"a": [1, 2], "b": [1, 2], "c": {"d": 3, "e": [1, 2]}}),
        ("[" * 31 + "1" + "]" * 31, json.loads("[" * 31 + "1" + "]" * 31)),
        ("", None),
    ],
)
def test_what_ends_is_read(text: str, value: object) -> None:
    assert parse_yaml(text) == value


CHAIN = "a: &a0 [x]\n" + "".join(f"k{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 60))
WIDE = f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * 1000)}]"
MERGED = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("&a [*a]", "an alias stands within what it stands for"),
        ("&a {b: {c: *a}}", "an alias stands within what it stands for"),
        ("[" * 100_000, "nested more than 32 levels"),
        ("{a: " * 100_000, "nested more than 32 levels"),
        ("- " * 100_000, "nested more than 32 levels"),
        (CHAIN, "nested more than 32 levels deep once its aliases are written out"),
        (WIDE, "more than 200,000 characters once its aliases are written out"),
        (MERGED, "more than 200,000 characters once its aliases are written out"),
        ("1" * 5000, "a number has more than 400 digits"),
        ("0x" + "f" * 5000, "a number has more than 400 digits"),
        ("2001-99-99", "a value is not of its kind"),
        ("!!bool maybe", "a value is not of its kind"),
        ("!!timestamp soon", "a value is not of its kind"),
        ("!!int ''", "a value is not of its kind"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: [", "expected the node content"),
        ("\0", "special characters are not allowed"),
    ],
)
def test_what_does_not_end_or_is_no_yaml_is_refused_in_a_second(text: str, reason: str) -> None:
    start = time.process_time()
    with pytest.raises(Unreadable, match=reason) as raised:
        parse_yaml(text)
    assert time.process_time() - start < 1
    assert "\n" not in str(raised.value)


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == b"x" * 100
    with pytest.raises(Unreadable, match="larger than 99 bytes"):
        read_bytes(path, 99)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing", 9)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(Unreadable, match="no regular file"):
            read_bytes(tmp_path / name, 9)
    path.write_bytes(b"a: \xff")
    with pytest.raises(Unreadable, match="byte 3 is not UTF-8"):
        read_yaml(path)
    path.write_text("x" * (MAX_YAML + 1))
    with pytest.raises(Unreadable, match="larger than 200,000 bytes"):
        read_yaml(path)
    with pytest.raises(Unreadable, match="larger than 200,000 bytes"):
        read_yaml(tmp_path / "zero", pipes=True)


def test_lines_come_in_chunks_and_long_ones_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    long = b"y" * (2 * MAX_LINE + 7)
    path.write_bytes(b"".join(b"%d\n" % i for i in range(2500)) + long + b"\nlast \xff")
    chunks = list(line_chunks(path, 10**9))
    assert [len(chunk) for chunk in chunks] == [1000, 1000, 502]
    lines = [line for chunk in chunks for line in chunk]
    assert lines[:2500] == [f"{i}\n" for i in range(2500)]
    assert lines[2500:] == ["y" * MAX_LINE, "last \ufffd"]
    assert [line for chunk in line_chunks(path, 5) for line in chunk] == ["0\n", "1\n", "2\n"]
