"""Every Python block of the README and the pages runs, or says why not, and prints what the page says."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from tests.docs.pages import PAGES, Block, blocks_of, name_of
from tests.trainers.support import NEEDS_TRAINERS
from treefx.config import Config

NEEDED = {"docs/tutorials/trl.md": ("trl", "datasets")}
WITH_PYTHON = [page for page in PAGES if any(item.runs for item in blocks_of(page.read_text(encoding="utf-8")))]


@pytest.fixture(autouse=True)
def fast_and_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Blocks name no inner compiler: here it is eager, which takes seconds. Files and process groups do not stay."""
    monkeypatch.setitem(Config.__init__.__kwdefaults__, "inner", "eager")
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_block(block: Block, page: str, names: dict[str, Any]) -> str:
    """Run a block with the names of the blocks above it; returns what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)
    return printed.getvalue()


def missing_lines(expected: str, printed: str) -> list[str]:
    """Lines of a page that were not printed in this order; spaces at the end of a line do not count."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    return [line for line in map(str.rstrip, expected.splitlines()) if line and line != "..." and line not in lines]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_blocks_of_a_page_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in NEEDED.get(name_of(page), ()):
        pytest.importorskip(library, reason=NEEDS_TRAINERS)
    # Dynamo imports the module of a function that it traces, and keeps it by name.
    module = ModuleType(re.sub(r"\W", "_", name_of(page)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    printed = ""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.mark == "prints":
            assert not missing_lines(block.code, printed), f"{name_of(page)}:{block.line} got\n{printed}"
        elif block.runs:
            printed = run_block(block, str(page), names)


def test_the_count_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [item for page in PAGES for item in blocks_of(page.read_text(encoding="utf-8"))]
    shown = [item for item in blocks if item.language == "python" and item.mark != "hidden"]
    run = [item for item in shown if item.runs]
    with capsys.disabled():
        print(f"\nPython blocks of the README and docs/: {len(run)} run, {len(shown) - len(run)} say why not")
    assert len(run) > 5 and len(run) > 3 * (len(shown) - len(run))


def test_a_block_that_fails_is_noticed() -> None:
    (block,) = blocks_of("text\n\n```python\nx = 1\nprint(y)\n```\n")
    with pytest.raises(NameError, match="'y'"):
        run_block(block, "page.md", {})


def test_marks_are_read() -> None:
    text = "<!-- run\nx = 2\n-->\n```python\nprint(x)\n```\n<!-- prints -->\n```text\n3\n```\n"
    hidden, shown, printed = blocks_of(text)
    assert (hidden.mark, shown.mark, printed.mark) == ("hidden", "", "prints")
    assert (hidden.line, shown.line, printed.line) == (2, 5, 9)
    names: dict[str, Any] = {}
    run_block(hidden, "page.md", names)
    assert missing_lines(printed.code, run_block(shown, "page.md", names)) == ["3"]
    (left_out,) = blocks_of("<!-- not run: takes an hour -->\n```python\nwait()\n```\n")
    assert not left_out.runs
