"""The page of a report: a frame, a style and a script, which ``treefx.inspection.html`` puts into one file.

In: nothing. Out: texts. The script draws from the data that stands in the page and asks no network for anything.
``vendor`` holds dagre, which lays out the neighbourhood of a node, with its licence.
"""

from importlib import resources

__all__ = ["page_part", "page_script"]

_SCRIPTS = ("base", "tree", "modules", "graph", "neighbourhood", "sections", "start")
"""In the order in which they need each other."""


def page_part(name: str) -> str:
    """``page.html``, ``page.css`` or one of the scripts."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def page_script() -> str:
    """Everything that the page runs: dagre, then the page's own scripts."""
    return "\n".join([page_part("vendor/dagre.min.js"), *(page_part(f"{name}.js") for name in _SCRIPTS)])
