"""MkDocs: take files from outside ``docs/`` into the site, so that links work there as they do in the repository.

A link from a page to ``../CONTRIBUTING.md`` or ``../../examples/results/x.md`` leads out of ``docs/``. On the site
these files stand at their paths from the root of the repository.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ["CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", ".github/SECURITY.md", "examples/results/*"]
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )(?!\w+:|#)([^)\s#]+)", re.MULTILINE)


def site_path(path: Path) -> str:
    """Where a file stands on the site; MkDocs leaves out names that begin with a dot."""
    return str(path.relative_to(ROOT)).lstrip(".")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages and each other link to."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out comments for the tests, and lead links to where the files stand on the site."""
    own = page.file.src_uri
    folder = Path(page.file.abs_src_path).parent
    depth = "../" * own.count("/")

    def lead(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        if target.is_relative_to(ROOT / "docs"):
            return f"{match[1]}{depth}{target.relative_to(ROOT / 'docs')}"
        return f"{match[1]}{depth}{site_path(target)}"

    text = re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
    return _LINK.sub(lead, text)
