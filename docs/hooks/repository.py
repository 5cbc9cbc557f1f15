"""Shows what lies beside docs/ on the site too, and turns links that work in the repository into links of the site.

A link to a folder leads to its README, one to a source file to the reference of its package.
"""

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SHOWN = ("results/**/*.md", "results/**/*.log", "results/**/*.png")
OPENED = (".md", ".log", ".png", ".svg")  # what a browser shows; other files of the repository are named, not linked
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that pages link to."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite the links of a page; those in code stay."""
    name = page.file.src_uri
    here = Path(name) if name.startswith("results/") else Path("docs") / name
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)  # every second one is code
    return "".join(
        part if number % 2 else LINK.sub(lambda match: link(match, here, name, files), part)
        for number, part in enumerate(parts)
    )


def link(match: re.Match[str], here: Path, name: str, files: Files) -> str:
    """Return one link as the site needs it."""
    text, target, anchor = match["text"], match["target"], match["anchor"] or ""
    found = Path(os.path.normpath(here.parent / target))
    if (ROOT / found / "README.md").is_file():
        found /= "README.md"
    if found.parts[:2] == ("src", "kairostep") and len(found.parts) > 2:
        found, anchor = Path("docs/reference") / f"{Path(found.parts[2]).stem}.md", ""
    inside = found.relative_to("docs") if found.parts[0] == "docs" else found
    if files.get_file_from_path(inside.as_posix()) is None:
        is_known = (ROOT / found).exists() and found.suffix not in OPENED
        return text if is_known else match[0]  # mkdocs complains of what is nowhere
    return f"[{text}]({os.path.relpath(inside, Path(name).parent)}{anchor})"
