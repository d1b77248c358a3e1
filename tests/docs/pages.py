"""Pages as data: their code blocks with marks, their prose, their headings and links.

A Python block runs in the tests, after the blocks above it on the same page. HTML comments, which no reader sees, say
more about a block:

    <!-- run ... -->          Python that runs here and is not shown: small models and batches
    <!-- not run: why -->     the block below does not run
    <!-- prints -->           the block below lists lines that the block above prints, in this order

``PYTHONPATH=. python -m tests.docs.pages`` counts the blocks of each page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GENERATED", "PAGES", "ROOT", "Block", "blocks_of", "name_of", "prose_of", "sentences_of"]

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {f"docs/{name}.md" for name in ("troubleshooting", "models", "options", "pytorch-patches")}
"""Pages that a command writes; their texts are tested where they are made."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run: [^\n]+?|prints) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$"
    r"|^<!-- run\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, or hidden Python."""

    language: str
    code: str
    line: int
    """Of the page, where the code begins; from 1."""
    mark: str
    """``"not run: ..."``, ``"prints"``, ``"hidden"`` or ``""``."""

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.mark.startswith("not run")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page, in order."""
    blocks = []
    for match in _BLOCK.finditer(text):
        group = "code" if match["hidden"] is None else "hidden"
        line = text.count("\n", 0, match.start(group)) + 1
        language = match["language"] if group == "code" else "python"
        blocks.append(Block(language, match[group], line, (match["mark"] or "") if group == "code" else "hidden"))
    return blocks


def prose_of(text: str) -> str:
    """The page without code blocks, comments and the addresses of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences_of(text: str) -> list[str]:
    """Sentences of the prose; a list item, a heading and a table's cell end one too."""
    sentences = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )|\|", prose_of(text)):
        sentences += re.split(r"(?<=[.!?])\s+(?=[`*(\[]*[A-Z`])", " ".join(part.split()))
    return [item for item in sentences if re.search(r"\w", item)]


def _count() -> None:
    total = [0, 0]
    for page in PAGES:
        python = [item for item in blocks_of(page.read_text(encoding="utf-8")) if item.language == "python"]
        shown = [item for item in python if item.mark != "hidden"]
        run = sum(item.runs for item in shown)
        total = [total[0] + run, total[1] + len(shown) - run]
        if shown:
            print(f"{name_of(page):40} {run:3} run  {len(shown) - run:3} marked with why not")
    print(f"{'all pages':40} {total[0]:3} run  {total[1]:3} marked with why not")


if __name__ == "__main__":
    _count()
