"""Pages and pictures that commands make are up to date: ``make docs`` makes them."""

import pytest

from tests.docs.pages import ROOT
from treefx.config import Config
from treefx.tools.reference_pages import PAGES
from treefx.tools.rows_picture import draw_rows

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name]()


def test_options_are_those_of_the_backend() -> None:
    rows = [line.split("|") for line in (DOCS / "options.md").read_text(encoding="utf-8").splitlines()]
    table = {row[1].strip(" `"): row[2].strip(" `") for row in rows if len(row) == 6}
    defaults = {name: repr(value) for name, value in Config.__init__.__kwdefaults__.items()}
    assert {name: table.get(name) for name in defaults} == defaults


def test_the_picture_is_up_to_date() -> None:
    picture = draw_rows()
    assert (DOCS / "rows-to-tree.svg").read_text(encoding="utf-8") == picture
    assert "4 rows of 42 tokens become a tree of 18" in picture
    assert "Four rows of 42 tokens become a tree of 18" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert draw_rows(["a b", "a c"]) != picture
