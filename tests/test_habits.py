"""Promises to contributors: workflows call existing commands, the changelog names public names."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

import treefx

ROOT = Path(__file__).resolve().parents[1]


def commands_of(workflow: str) -> list[str]:
    return re.findall(r"^\s*- run: (.+)$", workflow, re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").iterdir()), ids=lambda path: path.name)
def test_workflows_call_what_contributors_call(path: Path) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = set(phony.split())
    commands = commands_of(path.read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        program, *arguments = command.split()
        assert (ROOT / program).is_file() if "/" in program else (program == "make" and set(arguments) <= targets)


def test_a_command_that_is_not_there_is_noticed() -> None:
    assert commands_of("      - uses: x\n      - run: make nothing\n") == ["make nothing"]


def test_the_changelog_names_every_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security",
    }  # fmt: skip


def test_what_the_changelog_names_is_public() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`treefx\.(\w+)", text))
    assert len(named) > 8 and named <= set(treefx.__all__)


def test_modules_of_the_policy_have_public_names() -> None:
    policy = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Public names")[2].split("\n\n")[1]
    modules = re.findall(r"`(treefx\.[a-z]+)`", policy)
    assert len(modules) == 7
    for name in modules:
        assert attrgetter(name.removeprefix("treefx."))(treefx).__all__, name
