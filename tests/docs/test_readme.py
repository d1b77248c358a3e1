"""The README is short, starts with the two commands, and has no long sentence; nor have the pages."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import GENERATED, PAGES, ROOT, name_of, sentences_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 30  # words


def long_sentences(text: str) -> list[str]:
    return [item for item in sentences_of(text) if len(re.findall(r"[^\s`*]*\w[^\s`*]*", item)) > LONGEST]


def test_length() -> None:
    assert len(README.splitlines()) <= 170
    assert len(README.encode()) <= 10 * 1024


def test_the_two_commands_come_first() -> None:
    commands = re.match(r"# treefx\n\n```sh\nmake demo\b[^\n]*\nmake test\b[^\n]*\n```\n", README)
    assert commands, README[:200]


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in GENERATED], ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    assert not long_sentences(page.read_text(encoding="utf-8"))


def test_a_long_sentence_is_noticed() -> None:
    assert not long_sentences("word " * 30 + ".\n\n" + "- word\n" * 40 + "| " + "word | " * 40)
    assert not long_sentences("```python\n" + "word " * 40 + "\n```\n")
    (found,) = long_sentences("Short. " + "[Word](there) " + "word " * 30 + "end. Short.")
    assert found.startswith("Word word")
