"""Pictures of a page: their size, and that light and dark differ."""

import shutil
import struct
from pathlib import Path

import pytest

import treefx
from treefx.tools import screenshots

PAGE = """<!doctype html><style>:root { color-scheme: light dark; }</style><body>text
<script>const data = {nodes: {rewritten: [["a"]]}}, MARK = 0, NAME = 0;</script></body>"""


def test_pictures_of_a_page(tmp_path: Path) -> None:
    if not any(map(shutil.which, screenshots._BROWSERS)):
        pytest.skip("no Chromium on this machine")
    saved = screenshots.save_pictures(PAGE, tmp_path / "docs")
    assert [path.name for path in saved] == ["report-dark.png", "report-light.png"]
    dark, light = (path.read_bytes() for path in saved)
    assert struct.unpack(">II", light[16:24])[0] == 1280 and dark != light


def test_without_a_browser_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(treefx.UnsupportedError, match="install Chromium"):
        screenshots.save_pictures(PAGE, tmp_path)
