"""Writes a page: one HTML file that opens offline, with everything inside, including plotly.js."""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kairostep.files import whole_file
from kairostep.installation import missing
from kairostep.plots import Curve, Figure, Heat

SCRIPTS = ("plots.js", "exports.js", "page.js")
STYLES = ("page.css", "print.css")


@dataclass(frozen=True)
class Group:
    """Curves that are shown and hidden together, such as those of a run. Groups of one arm share a colour."""

    key: str
    name: str
    arm: str
    short: str = ""  # within its arm, such as the seed
    settings: str = ""  # for a tooltip


def write_figures(title: str, intro: str, figures: Sequence[Figure], output: Path) -> Path:
    """Write a page of figures, one colour per name of a curve, and return its path."""
    drawn: list[Curve | Heat] = []
    for figure in figures:
        for panel in figure.panels:
            drawn += [*panel.curves, *([panel.heat] if panel.heat else [])]
    names = dict.fromkeys(each.group or each.name for each in drawn)
    groups = [Group(name, name, name) for name in names]
    return write_page(output, whole_page({"title": title, "intro": intro}, groups, figures))


def write_page(output: Path, text: str) -> Path:
    """Write a page, whole or not at all. Raise ValueError if it cannot be written."""
    try:
        with whole_file(output, shared=True) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # file names may hold any bytes
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"the page must go to a file that can be written, got {output}: {reason}") from error
    return output


def whole_page(context: Mapping[str, Any], groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """Return a page with its scripts. `context` holds the title, the intro and what else the templates show."""
    plotly = import_extra("plotly.offline").get_plotlyjs()
    markup = import_extra("markupsafe").Markup
    assets = {
        "plotly": markup(plotly),
        "styles": markup("\n".join(map(_asset, STYLES))),
        "scripts": markup("\n".join(map(_asset, SCRIPTS))),
    }
    return _render("page.html", context, groups, figures, assets)


def content(context: Mapping[str, Any], groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """Return the part of a page that changes with its runs, to update an open page."""
    return _render("content.html", context, groups, figures, {})


def import_extra(name: str) -> Any:
    """Return a module of the extra `report`. If it is not installed, the error names the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing("a report", error, "report") from error


def _render(
    template: str,
    context: Mapping[str, Any],
    groups: Sequence[Group],
    figures: Sequence[Figure],
    assets: Mapping[str, Any],
) -> str:
    jinja2 = import_extra("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    plain = {"groups": [vars(group) for group in groups], "figures": [figure.plain() for figure in figures]}
    data = import_extra("markupsafe").Markup(_script_json(plain))
    text: str = environment.get_template(template).render(
        **context, **assets, figures=figures, groups=groups, data=data
    )
    return text


def _asset(name: str) -> str:
    return (resources.files("kairostep.reports") / "templates" / name).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
