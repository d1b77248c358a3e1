"""Pictures of the page of a report for the docs, by a Chromium that is installed.

``python -m treefx.tools.screenshots docs`` (``make screenshots``) compiles a small model, writes its page and saves
``report-light.png`` and ``report-dark.png``, 1280 pixels wide.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from treefx.errors import UnsupportedError

__all__ = ["save_pictures"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SCHEMES = {"dark": 0, "light": 1}
"""Numbers of the browser's setting."""
_HEIGHT = 2280
# The details of a node name files of this machine.
_SHOWN = """<script>
showNode("rewritten", data.nodes.rewritten.find((node) => node[MARK] === "attention")[NAME]);
byId("node-detail").hidden = true;
</script></body>"""


def save_pictures(page: str, folder: Path) -> list[Path]:
    """Save a page in light and dark as ``report-light.png`` and ``report-dark.png``.

    Raises:
        UnsupportedError: No Chromium is installed.
    """
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UnsupportedError(f"pictures need a browser, one of {', '.join(_BROWSERS)}: install Chromium")
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    with tempfile.TemporaryDirectory() as scratch:
        opened = Path(scratch) / "page.html"
        opened.write_text(page.replace("</body>", _SHOWN), encoding="utf-8")
        for scheme, number in _SCHEMES.items():
            saved.append(folder.resolve() / f"report-{scheme}.png")
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                "--disable-background-networking", f"--user-data-dir={scratch}/{scheme}",
                f"--window-size=1280,{_HEIGHT}", f"--blink-settings=preferredColorScheme={number}",
                f"--screenshot={saved[-1]}", opened.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    return saved


def _page() -> str:
    """The page of a small Gemma 2 on rows that share a prefix."""
    import treefx
    from treefx.inspection.html import render_page
    from treefx.tools.bench.job.synthetic import shared_prefix_batch
    from treefx.tools.bench.zoo.models import VOCABULARY
    from treefx.tools.bench.zoo.single import build_model, run_single

    run = run_single(build_model("gemma2", 56), shared_prefix_batch(6, 40, 16, VOCABULARY), "aot_eager")
    return render_page(treefx.inspect(run.compiled))


if __name__ == "__main__":
    save_pictures(_page(), Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
