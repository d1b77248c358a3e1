"""Pages in headless Chromium, and texts that attack them."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HOSTILE", "Words", "answer_of"]

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=document.title='broken'>"
    "\"'`${document.title='broken'}\u2028\u2029]]>--><svg/onload=document.title='broken'>"
)


class Words:
    """A tokenizer whose texts attack the page."""

    def decode(self, ids: list[int]) -> str:
        return HOSTILE + "".join(f" word{i}" for i in ids)


def answer_of(text: str, tmp_path: Path, driver: str, *flags: str) -> dict[str, Any]:
    """Open a page and return what a script finds in it.

    Args:
        text: The page.
        tmp_path: For the page and the browser's profile.
        driver: JavaScript that runs behind the page's own and fills an object ``answer``.
        flags: Of the browser.
    """
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    path = tmp_path / "page.html"
    guarded = f"try {{ {driver} }} catch (error) {{ answer.error = error.stack; }}"
    script = f"const answer = {{}}; {guarded} document.documentElement.dataset.answer = JSON.stringify(answer);"
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    size = ["--window-size=1280,900", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *usual, *size, *flags, "--dump-dom", path.as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-answer="([^"]*)"', printed)
    assert found is not None, printed[-500:]
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in answer, answer["error"]
    return answer
