"""Report the backend's work on a model: ``treefx inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treefx.cli.checks import check_choice, check_output
from treefx.config import Config
from treefx.errors import InputError
from treefx.output import print_json, print_line, waiting

if TYPE_CHECKING:
    from treefx.inspection.inspector import Inspection
    from treefx.tools.bench.zoo.single import GradientCheck

__all__ = ["inspect"]

_STAGES = ("captured", "rewritten", "forward", "backward")


# Long: an option takes one line or three.
def inspect(
    model: Annotated[
        str, typer.Argument(help="An architecture (llama, qwen3, ...), a model of the zoo, or a config.json.")
    ],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 4,
    prefix: Annotated[int, typer.Option(min=0, help="Tokens that all rows share.")] = 24,
    suffix: Annotated[int, typer.Option(min=1, help="Further tokens of every row.")] = 8,
    inner: Annotated[str, typer.Option(help="Inner compiler: aot_eager, inductor or eager.")] = "aot_eager",
    stage: Annotated[str, typer.Option(help="Graph to write: captured, rewritten, forward or backward.")] = "rewritten",
    out: Annotated[Path | None, typer.Option(help="Write the graph of --stage to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write everything to this file, as one html page.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write passes and calls as a trace for Perfetto.")] = None,
    model_explorer: Annotated[
        Path | None, typer.Option(help="Write the graphs for Google's Model Explorer, and overlays next to them.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
) -> None:
    """Compile a small model, run one batch forward and backward, and say what was rewritten.

    An architecture gets two narrow layers with random weights; a config.json is used unchanged, so give a
    small one. The report is printed and written first. Then the gradients are compared with eager float64,
    every row separately; the exit status is 1 if they differ by more than rounding.
    """
    check_choice("--stage", stage, _STAGES)
    Config.from_options({"inner": inner})
    check_output("--out", out)
    files = {"page": html, "trace": perfetto, "Model Explorer": model_explorer}
    for option, path in zip(("--html", "--perfetto", "--model-explorer"), files.values(), strict=True):
        check_output(option, path)
    with waiting("loading PyTorch", quiet=json) as progress:
        import treefx
        from treefx.tools.bench.job.synthetic import shared_prefix_batch
        from treefx.tools.bench.zoo.models import VOCABULARY
        from treefx.tools.bench.zoo.single import build_model, run_single

        batch = shared_prefix_batch(rows, prefix, suffix, VOCABULARY)
        progress.tell(f"making {model}")
        built = build_model(model, prefix + suffix)
        progress.tell(f"compiling {model}")
        run = run_single(built, batch, inner)
        report = treefx.inspect(run.compiled)
        progress.tell("writing the report")
        written, refusal = _write(report, stage, out, files)
    if not json:
        print_line(report.summary())
        for line in written:
            print_line(line)
    with waiting("comparing gradients with eager float64", quiet=json):
        check = run.check_gradients()
    _show(check, report, json)
    if refusal is not None:
        raise refusal
    if check.is_wrong:
        raise typer.Exit(1)


def _write(
    report: Inspection, stage: str, out: Path | None, files: Mapping[str, Path | None]
) -> tuple[list[str], InputError | None]:
    """Write the files, and return a line about each.

    A graph that does not exist must not lose the page.
    """
    written = []
    writers = (report.to_html, report.to_perfetto, report.to_model_explorer)
    for (name, path), write in zip(files.items(), writers, strict=True):
        if path is not None:
            write(path)
            written.append(f"{name}: {path}")
    if out is not None:
        try:
            out.write_text(report.readable(stage), encoding="utf-8")
        except InputError as error:
            return written, error
        written.append(f"{stage} graph: {out}")
    return written, None


def _show(check: GradientCheck, report: Inspection, json: bool) -> None:
    if not json:
        print_line(str(check), style="red" if check.is_wrong else None)
        return
    figures = {
        "stats": report.stats,
        "gradient_error": check.error,
        "gradient_error_of": check.parameter,
        "eager_gradient_error": check.eager_error,
        "not_compared": check.failure,
    }
    print_json(figures, "treefx.inspect/1")
