"""Reads files that anybody may have written, with limits on their kind, size and depth.

A run folder can come from somebody else. Nothing in it may hang a command or fill the memory.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import yaml

MAX_YAML = 200_000  # characters with aliases expanded; a config has 2,000, and PyYAML takes 6 s for this many
MAX_DEPTH = 32  # of lists and mappings in YAML
MAX_NUMBER = 400  # characters of a number; Python does not print integers of several thousand digits
MAX_LINE = 1_000_000  # bytes
CHUNK_LINES, CHUNK_BYTES = 1000, 4_000_000  # read at once


class Unreadable(ValueError):
    """The reason why a file cannot be read. The caller's message names the file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Raise `Unreadable` for anything else, such as a pipe, which could block for ever."""
    no_wait = getattr(os, "O_NONBLOCK", 0)  # do not wait for the writer of a pipe
    number = os.open(path, os.O_RDONLY | no_wait | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise Unreadable("it is no regular file")
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file. Raise `Unreadable` if it has more than `most` bytes."""
    with open_regular(path) as file:
        return _at_most(file, most)


def read_yaml(path: Path, *, pipes: bool = False) -> Any:
    """Return the content of a YAML file.

    Args:
        path: The file.
        pipes: Whether it may be a pipe.

    Raises:
        Unreadable: It is no YAML, or exceeds a limit.
        OSError: It cannot be opened.
    """
    if not pipes:
        return parse_yaml(_text(read_bytes(path, MAX_YAML)))
    with path.open("rb") as file:
        return parse_yaml(_text(_at_most(file, MAX_YAML)))


def parse_yaml(text: str) -> Any:
    """Return the content of YAML. Raise `Unreadable` if it is no YAML, too deep, or too large with its aliases."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _extent(node, {})
        return loader.construct_document(node)
    except Unreadable:
        raise
    except yaml.YAMLError as error:
        raise Unreadable(" ".join(str(error).split())) from error  # on one line
    except Exception as error:  # `!!bool maybe` is a KeyError, `!!timestamp x` an AttributeError, ...
        raise Unreadable(f"a value is not of its kind ({type(error).__name__}: {error})") from error


def line_chunks(path: Path, most: int) -> Iterator[list[str]]:
    """Yield lists of lines of a regular file, up to `most` bytes in all. Long lines are cut."""
    with open_regular(path) as file:
        chunk: list[str] = []
        size = total = 0
        while total < most and (line := file.readline(MAX_LINE)):
            chunk.append(line.decode("utf-8", errors="replace"))
            rest = line
            while len(rest) == MAX_LINE and not rest.endswith(b"\n") and total < most:
                total += len(rest)
                rest = file.readline(MAX_LINE)
            size, total = size + len(line), total + len(rest)
            if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


class Loader(yaml.SafeLoader):
    """Safe YAML of bounded depth. 1e-3 is a number, as in YAML 1.2; plain PyYAML reads it as text."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Raise `Unreadable` if it is too deep: PyYAML would raise RecursionError."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _at_most(file: BinaryIO, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise Unreadable(f"it is larger than {most:,} bytes")
    return content


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from error


class _Extent(NamedTuple):
    size: int  # characters
    height: int


def _extent(node: yaml.Node, known: dict[int, _Extent | None]) -> _Extent:
    """Return the size of a node with its aliases expanded. Raise `Unreadable` if it is too large or endless.

    An alias comes after its anchor, so this recursion is no deeper than the text.
    """
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise Unreadable("an alias stands within what it stands for")
        return found
    known[id(node)] = None  # until all children are counted
    inside = [_extent(child, known) for child in _children(node)]
    letters = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
    extent = _Extent(
        1 + letters + sum(part.size for part in inside), 1 + max((part.height for part in inside), default=0)
    )
    if extent.size > MAX_YAML:
        raise Unreadable(f"it holds more than {MAX_YAML:,} characters once its aliases are written out")
    if extent.height > MAX_DEPTH:
        raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep once its aliases are written out")
    known[id(node)] = extent
    return extent


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_NUMBER:
        raise Unreadable(f"a number has more than {MAX_NUMBER} digits")
    return []
