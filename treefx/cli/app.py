"""The command ``treefx``, also ``python -m treefx``."""

from typing import Annotated

import typer

from treefx.cli.lazy import LazyCommand, lazy_group
from treefx.output import print_line, refusals_end_the_command

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "demo": LazyCommand(
        "treefx.cli.demo:demo", "Train a small model on rollouts of a scripted agent, with treefx and without."
    ),
    "inspect": LazyCommand(
        "treefx.cli.inspect_model:inspect",
        "Compile a small model, run one batch forward and backward, and say what was rewritten.",
    ),
    "explain": LazyCommand(
        "treefx.cli.explain:explain",
        "Say what treefx would do with a model and a batch, before anything runs.",
    ),
    "plan": LazyCommand(
        "treefx.cli.plan:plan",
        "Cut the tree of all rollouts into parts that fit a memory limit, and show what that costs.",
    ),
    "data": LazyCommand(
        "treefx.cli.data:data", "Count what rollouts share: separate rows, merged rows, and the tree of prefixes."
    ),
    "doctor": LazyCommand(
        "treefx.cli.doctor:doctor",
        "Check the installation: versions, devices, the entry point, and a small model against eager execution.",
    ),
    "fuzz": LazyCommand(
        "treefx.cli.fuzz:fuzz", "Search for programs that treefx computes otherwise than eager execution."
    ),
    "run": LazyCommand(
        "treefx.cli.run:run",
        "Run a training command with treefx in every Python process it starts; no line of it changes.",
        {"allow_interspersed_args": False},
    ),
    "bench": LazyCommand(
        "treefx.cli.bench:bench", "Measure: building forests, attention over a tree, a whole training step."
    ),
    "simulate": LazyCommand(
        "treefx.cli.simulate:simulate",
        "Simulate communication, and overlap with the work, on hardware that need not be there.",
    ),
}
"""Every command, in the order of the help."""

app = typer.Typer(
    name="treefx",
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import treefx

        print_line(f"treefx {treefx.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train on rollouts that share prefixes, computing each distinct prefix once, exactly."""


def main() -> None:
    """Run the command line; a refusal of treefx ends it with one line and exit status 2."""
    with refusals_end_the_command():
        app()
