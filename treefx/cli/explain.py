"""``treefx explain``: a dry run of a model and a batch."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from treefx.cli.checks import check_output
from treefx.cli.explain_batch import parse_given
from treefx.config import Config
from treefx.output import print_json, print_line, waiting

__all__ = ["explain"]


# Long: an option takes one line or three.
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="script.py:model, an architecture (llama, qwen3, ...), a model of the zoo, or a config.json."
        ),
    ],
    batch: Annotated[
        str,
        typer.Option(help="ROWSxSHARED+OWN tokens, a .json file with rows of token ids, or script.py:batch."),
    ] = "4x24+8",
    min_sharing: Annotated[float, typer.Option(help="The least sharing ratio that is packed.")] = 1.0,
    on_unsupported: Annotated[str, typer.Option(help="expand, fallback or error: as for the backend.")] = "expand",
    timed: Annotated[
        bool, typer.Option("--timed", help="Run the forward one operator at a time, for the time of each module.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the whole report to this file, as one html page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON (treefx.report/1).")] = False,
) -> None:
    """Say what treefx would do with a model and a batch, before anything runs.

    A dry run on fake tensors: no operator of the model runs, nothing is compiled, and no weight changes. It prints
    which share of the FLOPs would run once per distinct token, what the rows of the batch share, the predicted gain
    in tokens, FLOPs and memory, and every operator that would run on rows, with your line and the way out.

    \b
        treefx explain llama --batch 8x512+64
        treefx explain train.py:model --batch train.py:batch --html report.html
        treefx explain train.py:make_model --batch rows.json --json

    A name of a script is a module, a dict of the call's arguments, or a function without arguments that returns one.
    Code below `if __name__ == "__main__"` does not run. An architecture gets two narrow layers with random weights.
    Memory is what the forward keeps for the backward; its figure on rows is the same graph with no token shared. With
    --timed the forward runs, without gradients and not compiled: times say where it spends them, not how fast it is.
    The exit status is 0 also where everything would run on rows: that is an answer.
    """
    given = parse_given(model, batch)
    options: dict[str, Any] = {"min_sharing": min_sharing, "on_unsupported": on_unsupported}
    Config.from_options(options)
    check_output("--html", html)
    with waiting("loading PyTorch", quiet=json) as progress:
        import treefx
        from treefx.cli.explain_text import show_explained

        made, arguments = given.load(progress.tell)
        progress.tell(f"tracing {model}")
        report = treefx.explain(made, arguments, options, timed=timed)
        if html is not None:
            progress.tell("writing the page")
            report.to_html(html)
    if json:
        print_json(json_text.loads(report.to_json()), report.schema)
        return
    show_explained(report)
    if html is not None:
        print_line(f"page: {html}")
