"""Check prose for banned words: docstrings, comments, messages, documentation.

``python -m treefx.tools.words`` (``make lint``) checks the repository; with paths, those files and folders. In Python
files it reads docstrings, comments and strings that hold a space; in other files every line. A word in backticks or
double quotes is quoted on purpose, and so is a line that ends in ``words: quoted``.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BANNED", "Finding", "find_banned", "find_files"]

BANNED = {
    "nobody": "name the actor: the caller, the pass, the kernel",
    "somebody": "name the actor: the caller, the pass, the kernel",
    "whoever": "name the actor: the caller, the pass, the kernel",
    "anew": "write again, or a verb: recompute, re-validate",
    "as it is": "write unchanged, or say in which form",  # words: quoted
    "so far": "say until when: of earlier calls, of this step",  # words: quoted
    "what is": "no relative clause as a subject or object: name the thing",  # words: quoted
    "beside": "as a preposition: write next to, and, or as well as",
    "tells": "data does not speak: write returns, reports, shows",
    "asks": "no noun, and data does not ask: write requests, reads, calls",
    "of its own": "write its own, separate, or a number",  # words: quoted
}
"""Phrase -> how to write instead; case and line breaks do not matter."""

ROOTS = [
    *("treefx", "passes", "kernels", "tests", "examples", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(".github", ".ci", ".pre-commit-config.yaml", "pyproject.toml", "Makefile"),
]
"""Folders and files of the repository that are checked without arguments."""

UNFINISHED: tuple[str, ...] = ()
"""Folders and files that are left out without arguments until their prose is rewritten."""

_SUFFIXES = {"", ".py", ".md", ".jinja", ".html", ".js", ".css", ".yml", ".yaml", ".toml"}
_RECORDS = ("examples/results", "vendor", ".venv", "__pycache__")
_QUOTED_LINE = "words: quoted"
_QUOTED = re.compile(r'``.*?``|`[^`\n]*`|"[^"\n]*"')
_PHRASES = re.compile(r"\b(" + "|".join(phrase.replace(" ", r"\s+") for phrase in BANNED) + r")\b", re.IGNORECASE)
_LITERAL = re.compile(r"""(?s)^([a-zA-Z]*)('''|\"\"\"|'|\")(.*)\2$""")


@dataclass(frozen=True)
class Finding:
    """One banned phrase.

    Attributes:
        line: Its line, from 1.
        phrase: The phrase, a key of `BANNED`.
    """

    line: int
    phrase: str


def find_banned(text: str, suffix: str) -> list[Finding]:
    """Find the banned phrases of one file.

    Args:
        text: The whole file.
        suffix: Its suffix, such as ".py": Python files are tokenized, all others are prose from end to end.

    Returns:
        Findings by line.
    """
    quoted = {number for number, line in enumerate(text.splitlines(), 1) if line.rstrip().endswith(_QUOTED_LINE)}
    found = []
    for first, prose in _blocks(_python_prose(text) if suffix == ".py" else [(1, text)]):
        bare = _QUOTED.sub(lambda match: "`" + "\n" * match.group().count("\n"), prose)
        for match in _PHRASES.finditer(bare):
            line = first + bare.count("\n", 0, match.start())
            if line not in quoted:
                found.append(Finding(line, " ".join(match.group().lower().split())))
    return sorted(found, key=lambda finding: finding.line)


def find_files(paths: Iterable[Path]) -> list[Path]:
    """List the files of prose among paths, without links and records of runs."""
    found = []
    for path in paths:
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [item for item in inside if item.is_file() and item.suffix in _SUFFIXES and not _is_skipped(item)]
    return sorted(set(found))


def _is_skipped(path: Path) -> bool:
    linked = any(parent.is_symlink() for parent in path.parents)
    return linked or any(f"/{record}/" in f"/{path.as_posix()}" for record in _RECORDS)


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each comment and each string with a space."""
    middle = getattr(tokenize, "FSTRING_MIDDLE", None)  # Python 3.12: the text between the braces of an f-string
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")
        elif token.type == tokenize.STRING or token.type == middle:
            literal = _LITERAL.match(token.string)
            prefix, content = (literal[1], literal[3]) if literal and token.type != middle else ("", token.string)
            if "f" in prefix.lower():
                content = re.sub(r"\{[^{}]*\}", "`", content)
            if " " in content:
                yield token.start[0], content


def _blocks(pieces: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join pieces on adjacent lines, so that a phrase is found across a line break."""
    first, block = 0, ""
    for line, piece in pieces:
        if block and line == first + block.count("\n") + 1:
            block += "\n" + piece
            continue
        if block:
            yield first, block
        first, block = line, piece
    if block:
        yield first, block


def main(arguments: list[str]) -> int:
    """Print each finding as path:line and return the exit status: 1 with findings."""
    count = 0
    for path in find_files(map(Path, arguments or ROOTS)):
        if not arguments and path.as_posix().startswith(UNFINISHED):
            continue
        for finding in find_banned(path.read_text(encoding="utf-8"), path.suffix):
            print(f'{path}:{finding.line}: "{finding.phrase}": {BANNED[finding.phrase]}')
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
