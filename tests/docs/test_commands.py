"""Commands that the README and the pages name exist, with the options they are given."""

import re
import shlex
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import GENERATED, PAGES, ROOT, blocks_of, name_of
from treefx.cli.app import COMMANDS

TARGETS = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split())


@cache
def load(name: str) -> Any:
    return COMMANDS[name].load(name)


def commands_in(text: str) -> list[str]:
    """Find commands in shell blocks and in code of the prose.

    They begin with ``treefx`` or ``make``, also after ``VARIABLE=x``.
    """
    lines = [line for item in blocks_of(text) if item.language == "sh" for line in item.code.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += re.findall(r"`([^`\n]+)`", prose)
    return [line for line in lines if re.match(r"(?:\w+=\S+ )*(?:treefx|make) [a-z]", line)]


def complaint_about(line: str) -> str:
    """Describe the mistake in a command; "" if it is right."""
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "make":
        return "" if set(words[1:]) <= TARGETS else f"no such target: {line}"
    if words[1] not in COMMANDS:
        return f"no such command: {line}"
    command, rest = load(words[1]), words[2:]
    if getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no such command: {line}"
        command, rest = command.commands[rest[0]], rest[1:]
    given = {word.partition("=")[0] for word in _until_other_program(rest) if word.startswith("-")}
    known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help"}
    return "" if given <= known else f"no such option {sorted(given - known)}: {line}"


def _until_other_program(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in GENERATED], ids=name_of)
def test_commands_exist(page: Any) -> None:
    complaints = map(complaint_about, commands_in(page.read_text(encoding="utf-8")))
    assert not [item for item in complaints if item]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("treefx run --keep-groups -- accelerate launch --x train.py", False),
        ("treefx bench gpu --stage step", False),
        ("TREEFX_DUMP_DIR=here treefx doctor --code TFX104", False),
        ("make demo  # a comment", False),
        ("make dinner", True),
        ("treefx observe x", True),
        ("treefx run --keep-rows -- x", True),
        ("treefx bench nothing", True),
    ],
)
def test_wrong_commands_are_noticed(line: str, wrong: bool) -> None:
    assert bool(complaint_about(line)) is wrong
    assert commands_in(f"text `{line}` text") == [line]


def test_programs_of_shell_blocks_exist() -> None:
    """``python examples/...`` and ``python -m treefx...``."""
    for page in PAGES:
        for item in blocks_of(page.read_text(encoding="utf-8")):
            if item.language == "sh":
                for path in re.findall(r"(?<!\S)(examples/[\w/]+\.py)", item.code):
                    assert (ROOT / path).is_file(), (name_of(page), path)
