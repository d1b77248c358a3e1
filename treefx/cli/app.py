"""The command ``treefx``, also ``python -m treefx``."""

import typer

from treefx.cli.bench import bench
from treefx.cli.data import data
from treefx.cli.demo import demo
from treefx.cli.doctor import doctor
from treefx.cli.fuzz import fuzz
from treefx.cli.inspect_model import inspect
from treefx.cli.plan import plan
from treefx.cli.run import run
from treefx.cli.simulate import simulate
from treefx.output import refusals_end_the_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="treefx",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train on rollouts that share prefixes, computing each distinct prefix once, exactly.",
)
app.command()(demo)
app.command()(inspect)
app.command()(plan)
app.command()(data)
app.command()(doctor)
app.command()(fuzz)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.add_typer(bench, name="bench")
app.add_typer(simulate, name="simulate")


def main() -> None:
    """Run the command line; a refusal of treefx ends it with one line and exit status 2."""
    with refusals_end_the_command():
        app()
