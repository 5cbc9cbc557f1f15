"""Keeps browsers from breaking an identifier at a hyphen in a cell of a table: `cifar10-small`, `--sampler=speed`."""

import re
from typing import Any

CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
HYPHENATED = re.compile(r"[^\s]*-[^\s]*")


def on_page_content(html: str, **kwargs: Any) -> str:
    """Mark the words with a hyphen in the code of cells, for the style sheet."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: mark(code[0]), cell[0]), html)


def mark(code: str) -> str:
    """Return code with its hyphenated words in a `span` of class `word`."""
    return HYPHENATED.sub(lambda word: f'<span class="word">{word[0]}</span>', code)
