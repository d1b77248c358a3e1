"""Search randomly for programs that treefx computes wrongly: ``treefx fuzz``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treefx.config import Config
from treefx.output import console, count, make_table, print_json, print_line, waiting
from treefx.tools.fuzz.grammar import FAMILIES, choose_families
from treefx.tools.fuzz.samples.sample import FAMILY

if TYPE_CHECKING:
    from treefx.tools.fuzz.journal import Finding
    from treefx.tools.fuzz.search import Search

__all__ = ["fuzz"]

_FAMILY_HELP = f"Only this family; may be repeated: {', '.join(FAMILIES)}. Or {FAMILY}, by itself: PyTorch's samples."
_EVERY = 10**6
"""More than there are samples."""


def fuzz(
    programs: Annotated[
        int | None, typer.Option(min=1, help="Number of programs. [default: 300, of torch all]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same programs.")] = 0,
    family: Annotated[list[str] | None, typer.Option(help=_FAMILY_HELP, show_default=False)] = None,
    minutes: Annotated[float, typer.Option(help="Stop after this time. [default: none]", show_default=False)] = 0.0,
    inner: Annotated[
        str,
        typer.Option(help="Inner compiler. [default: eager or aot_eager, now and then inductor]", show_default=False),
    ] = "",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
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
    torch     torch's own backend differs or refuses in the same way
    invalid   the program does not run eagerly
    crashed, hung, wrong: failures of treefx

    Family torch calls every operator and module of PyTorch's tables on PyTorch's samples, with sizes static
    and dynamic, with gradients and without, in place and with out=: treefx must give what eager gives
    wherever aot_eager does.

    Failing programs are shrunk and written as separate scripts that print the expected and the actual result. The exit
    status is 1 if anything fails.
    """
    of_torch = family == [FAMILY]
    families = choose_families(() if of_torch else tuple(family or ()))
    number = programs or (_EVERY if of_torch else 300)
    if inner:
        Config.from_options({"inner": inner})
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.fuzz.report import failures_of, summary
        from treefx.tools.fuzz.sample_search import SampleSearch
        from treefx.tools.fuzz.search import Search, Settings

        settings = Settings(seed, families, number, minutes, workers, inner, out, limit, shrink)
        search = SampleSearch(settings) if of_torch else Search(settings)
    findings = _watched(search, json)
    if json:
        print_json(summary(findings), "treefx.fuzz/1")
    else:
        _show(findings, out)
    if failures_of(findings):
        raise typer.Exit(1)


def _watched(search: Search, json: bool) -> list[Finding]:
    """Run the search under a progress bar that counts failures."""
    from treefx.tools.fuzz.report import failures_of
    from treefx.tools.fuzz.truth import FAILURES

    failed = len(failures_of(search.findings))
    with waiting("judging programs", total=search.settings.programs, quiet=json) as progress:
        progress.advance(len(search.findings))

        def advance(finding: Finding) -> None:
            nonlocal failed
            if finding.kind in FAILURES:
                failed += 1
                progress.tell(f"judging programs: {failed} failed")
            progress.advance()

        return search.run(advance)


def _show(findings: list[Finding], out: Path) -> None:
    from treefx.tools.fuzz.report import counts_by_family, failures_of
    from treefx.tools.fuzz.truth import CLASSES, FAILURES

    counts = counts_by_family(findings)
    kinds = [kind for kind in CLASSES if kind in FAILURES or any(row[kind] for row in counts.values())]
    rows = [(family, *[row[kind] or "" for kind in kinds]) for family, row in counts.items()]
    total = ("all", *[sum(row[kind] for row in counts.values()) for kind in kinds])
    title = f"treefx fuzz: {count(len(findings), 'program')}"
    console.print(make_table(title, ("family", *kinds), [*rows, total], tight=True))
    for finding in failures_of(findings):
        print_line(f"{finding.kind}: {finding.program}", style="red")
        print_line(f"    {finding.note}")
        print_line(f"    {finding.script}")
    if not failures_of(findings):
        print_line("nothing failed", style="green")
    print_line(f"all programs: {out / 'programs.jsonl'}")
