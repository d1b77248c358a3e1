"""Hold the frame, style and script of a report's page for ``treefx.inspection.html``.

In: nothing. Out: texts. The script draws from data inside the page and makes no network request.
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
