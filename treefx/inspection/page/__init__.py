"""The page of a report: a frame, a style and a script, which ``treefx.inspection.html`` puts into one file.

In: nothing. Out: texts. The script draws from the data that stands in the page and asks no network for anything.
"""

from importlib import resources

__all__ = ["page_part"]


def page_part(name: str) -> str:
    """``page.html``, ``page.css`` or ``page.js``."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
