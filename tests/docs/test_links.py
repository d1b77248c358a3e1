"""Links and pictures of the README and the pages lead to files and headings that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of

WITH_LINKS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)=\"([^\"]+)\"")


def anchors_of(text: str) -> set[str]:
    """Anchors of headings as GitHub and MkDocs make them, and those written out."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    anchors = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchors.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return anchors


def broken_links(text: str, page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in (one or other for one, other in _LINK.findall(text)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", WITH_LINKS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken_links(page.read_text(encoding="utf-8"), page))


def test_broken_links_are_noticed() -> None:
    text = "# A title: `code`\n[a](nowhere.md) [b](#a-title-code) [c](README.md#no-such) ![d](no.png) [e](https://x.y)"
    found = list(broken_links(text, ROOT / "CONTRIBUTING.md"))
    assert [item.partition(":")[0] for item in found if "a-title" not in item] == [
        "nowhere.md", "README.md#no-such", "no.png",
    ]  # fmt: skip
    assert "a-title-code" in anchors_of(text)


def test_every_page_is_linked() -> None:
    """From the README or from another page."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in (one or other for one, other in _LINK.findall(page.read_text(encoding="utf-8")))
    }
    alone = {name_of(page) for page in PAGES} - {str(path.relative_to(ROOT)) for path in linked if path.is_file()}
    assert alone <= {"README.md"}
