"""Puts every registered sampler and weighting into the reference, where a page says `<!-- every sampler -->`."""

from typing import Any

import kairostep  # noqa: F401  # fills the registry
from kairostep.registry import samplers, weightings

PACKAGES = {"<!-- every sampler -->": samplers, "<!-- every weighting -->": weightings}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace each comment by one entry of the reference for each name."""
    for comment, registry in PACKAGES.items():
        entries = [entry_for(found) for found in registry.registered.values()]
        markdown = markdown.replace(comment, "\n\n".join(entries))
    return markdown


def entry_for(found: Any) -> str:
    """Return the line that mkdocstrings reads; methods that all samplers have are shown once, with their base class."""
    package = ".".join(found.__module__.split(".")[:2])
    options = "\n    options:\n      members: []" if isinstance(found, type) else ""
    return f"::: {package}.{found.__name__}{options}"
