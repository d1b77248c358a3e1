"""CONTRIBUTING.md names files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)(?:::(\w+))?`")
"""``folder/file`` or ``folder/file::name``."""
PLACES = sorted(set(NAMED.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_what_is_named_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    if name:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("subject", ["law", "kernel", "loss", "loader", "trainer", "architecture", "measurement"])
def test_the_walk_says_where_each_thing_goes(subject: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (paragraph,) = [part for part in text.split("\n\n") if re.match(rf"\*\*An? {subject}\b(?! of causality)", part)]
    assert NAMED.search(paragraph)


def test_missing_files_are_noticed() -> None:
    assert NAMED.findall("in `passes/nowhere.py::law`, not `make test`") == [("passes/nowhere.py", "law")]
    assert len(PLACES) > 25
