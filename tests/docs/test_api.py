"""The API reference has an entry for every public name, and none for a name that is not public."""

import inspect
import re
from importlib import import_module
from operator import attrgetter

import pytest

import treefx
from tests.docs.pages import ROOT

ENTRIES = {
    page.stem: re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
}
MODULES = ("data", "kernels", "losses", "overlap", "rl", "scale")
NAMES = [
    *(name for name in treefx.__all__ if name not in {*MODULES, "integrations", "__version__"}),
    *(f"{module}.{name}" for module in MODULES for name in getattr(treefx, module).__all__),
    *(f"integrations.{name}" for name in treefx.integrations.__all__),
]


def missing(names: list[str]) -> list[str]:
    """Names without an entry; an old name of something that has one needs none."""
    found = {entry for entries in ENTRIES.values() for entry in entries}
    return [name for name in names if f"treefx.{name}" not in found and not is_old(name)]


def is_old(name: str) -> bool:
    module, _, last = name.rpartition(".")
    item = attrgetter(name)(treefx) if module else None
    own = getattr(item, "__name__", last)
    return own != last and own in getattr(attrgetter(module)(treefx), "__all__") and not isinstance(item, type(treefx))


def test_no_public_name_is_missing() -> None:
    assert len(NAMES) > 140
    assert not missing(NAMES)
    assert missing(["nothing"]) == ["nothing"]


def test_modules_of_the_top_level_have_pages() -> None:
    text = (ROOT / "docs" / "api" / "treefx.md").read_text(encoding="utf-8")
    for module in (*MODULES, "integrations"):
        assert f"({module}.md)" in text and module in ENTRIES
    assert "treefx.__version__" in text


@pytest.mark.parametrize("page", ENTRIES)
def test_every_entry_exists_and_stands_once(page: str) -> None:
    entries = ENTRIES[page]
    assert len(entries) == len(set(entries))
    for entry in entries:
        if page == "integrations":
            import_module(entry)
        else:
            attrgetter(entry.removeprefix("treefx."))(treefx)


def test_public_classes_and_functions_have_docstrings() -> None:
    for name in NAMES:
        item = attrgetter(name)(treefx)
        if isinstance(item, type) or inspect.isfunction(item):
            assert (item.__doc__ or "").strip(), name
