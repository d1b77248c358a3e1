"""``treefx inspect``: what the backend does with a model."""

from pathlib import Path
from typing import Annotated

import typer

import treefx
from treefx.bench.job.models import make_config, make_model
from treefx.bench.job.synthetic import shared_prefix_batch
from treefx.bench.job.training import TrainingRun, gradient_error, reference_gradients
from treefx.output import print_json, print_line

__all__ = ["inspect"]


def inspect(
    model: Annotated[str, typer.Argument(help="An architecture (llama, qwen3, ...) or the path of a config.json.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 4,
    prefix: Annotated[int, typer.Option(min=0, help="Tokens that all rows share.")] = 24,
    suffix: Annotated[int, typer.Option(min=1, help="Further tokens of every row.")] = 8,
    inner: Annotated[str, typer.Option(help="Inner compiler: aot_eager, inductor or eager.")] = "aot_eager",
    stage: Annotated[str, typer.Option(help="Graph to write: captured, rewritten, forward or backward.")] = "rewritten",
    out: Annotated[Path | None, typer.Option(help="Write the graph of --stage to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write everything to this file, as one html page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
) -> None:
    """Compile a small model, run one batch forward and backward, and tell what was rewritten.

    An architecture gets two narrow layers with random weights; a config.json is taken as it is, so give a
    small one. The gradients are compared with eager float64, every row separately.
    """
    batch = shared_prefix_batch(rows, prefix, suffix, 128)
    causal_lm = make_model(make_config(model, vocab_size=128, max_positions=max(256, prefix + suffix)))
    run = TrainingRun(causal_lm, "treefx", options={"inner": inner, "min_sharing": 1.0})
    run.compile_for(batch)
    error, parameter = gradient_error(run.first_gradients, reference_gradients(causal_lm, batch))
    report = treefx.inspect(run.compiled)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.readable(stage), encoding="utf-8")
    if html is not None:
        report.to_html(html)
    if json:
        print_json({"stats": report.stats, "gradient_error": error, "gradient_error_of": parameter})
        return
    print_line(report.summary())
    print_line(f"gradients against eager float64: largest relative error {error:.1e} ({parameter})")
    for written, path in ((f"{stage} graph", out), ("page", html)):
        if path is not None:
            print_line(f"{written}: {path}")
