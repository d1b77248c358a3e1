"""Import commands when they run, so that ``treefx --help`` does not wait for PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

__all__ = ["LazyCommand", "flow", "lazy_group"]

_METAVARS = {
    "int": "N", "integer": "N", "float": "X", "text": "TEXT", "str": "TEXT", "list": "TEXT",
    "path": "PATH", "Path": "PATH",
}  # fmt: skip
"""Type name in versions of typer -> placeholder of a value in help."""


@dataclass(frozen=True)
class LazyCommand:
    """A command, or a group of them, by the place of its definition."""

    place: str
    """``module:attribute``: a function, or a ``typer.Typer``."""
    summary: str
    """First line of its docstring, for the list of commands."""
    settings: Mapping[str, Any] | None = None
    """``context_settings`` of typer."""

    def load(self, name: str) -> Any:
        """Import the command and make it ready to run."""
        module, _, attribute = self.place.partition(":")
        found: Any = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
            alone.command(name, context_settings=dict(self.settings or {}))(found)
            found = alone
        command: Any = typer.main.get_command(found)
        command.name = name
        return _polish(command)


def lazy_group(table: Mapping[str, LazyCommand]) -> type[TyperGroup]:
    """Make the class of a group that lists commands without importing them."""

    class Group(TyperGroup):
        def get_params(self, ctx: Any) -> list[Any]:
            found: list[Any] = super().get_params(ctx)
            for parameter in found:
                parameter.metavar = ""  # every option of the group is a flag
            return found

        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """A command as the list of commands shows it: its name and summary."""
            if cmd_name not in table:
                return None
            shown: Any = typer.main.get_command(_alone(cmd_name, table[cmd_name].summary))
            return shown

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command if name is None else table[name].load(name), rest

    return Group


def _alone(name: str, summary: str) -> typer.Typer:
    def nothing() -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command(name, help=escape(summary))(nothing)
    return alone


def _polish(command: Any) -> Any:
    """Reflow the help of a command and its subcommands; show square brackets verbatim."""
    for inner in getattr(command, "commands", {}).values():
        _polish(inner)
    command.help = flow(command.help or "")
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = escape(parameter.help)
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None and parameter.param_type_name == "option":
            parameter.metavar = _METAVARS.get(_type_name(parameter))
    help_option = command.get_help_option(typer.Context(command))
    if help_option is not None:
        help_option.metavar = ""
    return command


def _type_name(parameter: Any) -> str:
    """The name of an option's type; typer has it in one of two places, by its version."""
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is not None:
        return str(getattr(descriptor.annotation, "__name__", ""))
    return str(getattr(getattr(parameter, "type", None), "name", "")).removesuffix(" range")


def flow(text: str) -> str:
    """Join the lines of each paragraph, so that help wraps once, at the width of the terminal.

    A paragraph behind a line ``\\b`` or with indented lines keeps its lines.
    """
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip() != "\b"]
        keep = len(lines) < len(paragraph.splitlines()) or all(line.startswith("    ") for line in lines)
        paragraphs.append(escape(("\n" if keep else " ").join(lines)))
    return "\n\n".join(paragraphs)
