"""``treefx fuzz``: a random search for programs that treefx computes otherwise than eager execution."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treefx.fuzz.grammar import FAMILIES
from treefx.fuzz.journal import Finding
from treefx.fuzz.report import counts_by_family, failures_of, summary
from treefx.fuzz.search import Search, Settings
from treefx.fuzz.truth import CLASSES, FAILURES
from treefx.output import console, make_table, notes, print_json, print_line

__all__ = ["fuzz"]

_FAMILY_HELP = "Only this family; may be repeated: " + ", ".join(FAMILIES) + "."


def fuzz(
    programs: Annotated[int, typer.Option(help="Number of programs.")] = 300,
    seed: Annotated[int, typer.Option(help="The same seed draws the same programs.")] = 0,
    family: Annotated[list[str] | None, typer.Option(help=_FAMILY_HELP, show_default=False)] = None,
    minutes: Annotated[float, typer.Option(help="Stop after this time. [default: none]", show_default=False)] = 0.0,
    inner: Annotated[
        str,
        typer.Option(help="Inner compiler. [default: eager or aot_eager, now and then inductor]", show_default=False),
    ] = "",
    workers: Annotated[int, typer.Option(help="Number of processes.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder of results and scripts; the same command goes on where it ended.")
    ] = Path("out/fuzz"),
    limit: Annotated[float, typer.Option(help="Seconds after which a program counts as hung.")] = 120.0,
    shrink: Annotated[int, typer.Option(help="Failures per class and family that are made smaller.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Search for programs that treefx computes otherwise than eager execution.

    Draws small models, batches that share prefixes, and sequences of calls: attentions and masks in many
    spellings, mixers, experts, losses, inputs, autograd functions, changing buffers, grad modes, threads,
    forests. Each runs eagerly in float64 and compiled; losses, gradients, buffers and outputs must agree
    to 1e-10.

    \b
    exact     packed whole
    expanded  exact, some operators on rows, each named
    rows      exact on the ordinary graph, the reason named
    refused   an error of treefx that says what it is and the way out
    nan       eager itself is not finite
    torch     torch's own backend differs from eager, or refuses, in the same way
    invalid   the program does not run eagerly
    crashed, hung, wrong: failures of treefx

    What fails is made smaller while it fails and written as a script of its own that prints what it wants
    and gets. The exit status is 1 if anything fails.
    """
    settings = Settings(seed, tuple(family or ()), programs, minutes, workers, inner, out, limit, shrink)
    search = Search(settings)
    findings = _watched(search)
    if json:
        print_json(summary(findings))
    else:
        _show(findings, out)
    if failures_of(findings):
        raise typer.Exit(1)


def _watched(search: Search) -> list[Finding]:
    """Run the search under a progress bar that counts failures."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        done, failed = len(search.findings), len(failures_of(search.findings))
        task = progress.add_task("fuzz", total=search.settings.programs, completed=done)

        def advance(finding: Finding) -> None:
            nonlocal failed
            failed += finding.kind in FAILURES
            progress.update(task, advance=1, description=f"fuzz: {failed} failed" if failed else "fuzz")

        return search.run(advance)


def _show(findings: list[Finding], out: Path) -> None:
    counts = counts_by_family(findings)
    kinds = [kind for kind in CLASSES if kind in FAILURES or any(row[kind] for row in counts.values())]
    rows = [(family, *[row[kind] or "" for kind in kinds]) for family, row in counts.items()]
    total = ("all", *[sum(row[kind] for row in counts.values()) for kind in kinds])
    console.print(make_table(f"treefx fuzz: {len(findings)} programs", ("family", *kinds), [*rows, total]))
    for finding in failures_of(findings):
        print_line(f"{finding.kind}: {finding.program}", style="red")
        print_line(f"    {finding.note}")
        print_line(f"    {finding.script}")
    if not failures_of(findings):
        print_line("nothing failed", style="green")
    print_line(f"all programs: {out / 'programs.jsonl'}")
