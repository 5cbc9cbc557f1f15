"""The documents of the repository, and the code in them."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.name != "CHANGELOG.md"
)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE)
COMMANDS = ("", "console", "bash", "sh")  # languages of blocks whose lines are typed
IN_A_SENTENCE = re.compile(r"`((?:kairostep|make|python -m) [^`]*|python benchmarks/[^`]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    code: str


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks in their order, without their indent."""
    return [Block(found["language"], textwrap.dedent(found["code"])) for found in FENCE.finditer(text)]


def python_parts(document: str) -> dict[str, list[str]]:
    """Return the Python blocks that belong together: those of a document, or of a section on another library."""
    text = text_of(document)
    parts = {document: text}
    if document == "docs/integrations.md":
        sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
        parts = {f"{document}: {section.splitlines()[0]}": section for section in sections}
    found = {name: [block.code for block in blocks(part) if block.language == "python"] for name, part in parts.items()}
    return {name: codes for name, codes in found.items() if codes}


def typed_lines(document: str) -> Iterator[list[str]]:
    """Yield each command of a document in its words: lines of blocks, and those in sentences that are not cut short."""
    text = text_of(document)
    for block in blocks(text):
        if block.language in COMMANDS:
            lines = block.code.replace("\\\n", " ").splitlines()
            yield from (words for line in lines for words in commands_of(line))
    for line in IN_A_SENTENCE.findall(FENCE.sub("", text).replace("\n", " ")):
        is_pattern = "..." in line or re.search(r"\b[A-Z]{2,}\b|\||=value|\bX\b", line)
        if not is_pattern:
            yield from (words if len(words) != 2 else [*words, "--help"] for words in commands_of(line))  # a mere name


def commands_of(line: str) -> list[list[str]]:
    """Return the commands of a line in words, without its comment and without those that `...` leaves open."""
    words = shlex.split(line, comments=True)
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command and "..." not in command]
