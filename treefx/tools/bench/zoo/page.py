"""The page of models, ``docs/models.md``, made from what ``treefx doctor --zoo --out`` wrote.

``python -m treefx.tools.bench.zoo.page docs/models.md RECORD [RECORD]`` writes it: the first record is the table, the
second says which models were run with inductor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from treefx.documents import read_document
from treefx.errors import InputError
from treefx.tools.bench.job.models import read_configurations
from treefx.tools.bench.zoo.models import zoo_models
from treefx.tools.bench.zoo.run import ZooRow

__all__ = ["ENOUGH", "page"]

ENOUGH = 0.95
"""A model counts as packed if this share of its floating-point operations runs once per distinct token."""
_MEANINGS = {
    "partly": "exact; some products run on rows",
    "rows": "exact; everything runs on rows",
    "refused": "refused by name",
    "fails in PyTorch": "eager, or torch.compile without treefx, fails",
    "crashed": "crashed",
    "rounds": "exact in float64; rounds more than eager in float32",
    "wrong": "wrong",
    "not installed": "the library is not installed",
}


def page(records: Sequence[Path]) -> str:
    """The text of the page.

    Args:
        records: What ``treefx doctor --zoo --out`` wrote: with aot_eager, and for some models with inductor.
    """
    made, rows = _read(records[0])
    with_inductor = {row.model: row for record in records[1:] for row in _read(record)[1]}
    packed = [row for row in rows if _is_packed(row)]
    others = [row for row in rows if not _is_packed(row)]
    lines = [*_head(made, rows, packed, with_inductor), *_packed_table(packed, with_inductor)]
    lines += ["", "## Models with products on rows", "", *_others_table(others), "", *_left_out()]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> tuple[dict[str, str], list[ZooRow]]:
    document = read_document(path, "what `treefx doctor --zoo --out` writes", allow_nan=True)
    made = {name: document[name].read(str) for name in ("inner", "torch", "transformers", "batches")}
    return made, document["rows"].read(list[ZooRow])


def _is_packed(row: ZooRow) -> bool:
    return row.verdict in ("packed", "partly") and row.packed_share_of_all >= ENOUGH


def _head(
    made: dict[str, str], rows: Sequence[ZooRow], packed: Sequence[ZooRow], with_inductor: dict[str, ZooRow]
) -> Iterator[str]:
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("wrong", "crashed")}
    yield "# Models"
    yield ""
    yield "Tiny random models of every causal architecture of transformers, and of other libraries, run one training"
    yield f"step on batches of {made['batches']}. Loss and every gradient are compared with eager execution."
    yield ""
    yield f"- {len(rows)} models: **{len(packed)} run at least {ENOUGH:.0%} of their floating-point operations once per"
    yield f"  distinct token**, {counts['wrong']} are wrong, {counts['crashed']} crash where"
    yield "  `torch.compile` alone does not."
    if rounds := [row.model for row in rows if row.verdict == "rounds"]:
        yield f"- Exact in float64, but further from it in float32 than 1.5 times eager: {', '.join(rounds)}."
    if missing := [model.name for model in zoo_models() if model.name not in {row.model for row in rows}]:
        yield f"- Not in this record: {', '.join(missing)}."
    if with_inductor:
        exact = sum(row.verdict in ("packed", "partly", "rows") for row in with_inductor.values())
        yield f"- With inductor: {len(with_inductor)} models, {exact} exact."
    yield f"- Made with torch {made['torch']}, transformers {made['transformers']}, inner compiler {made['inner']},"
    yield "  on a CPU, by `treefx doctor --zoo --workers 1 --out zoo.json --resume` and `make docs`."
    yield ""
    yield "## Packed models"
    yield ""
    yield "Tokens: run, of those in both batches. Error: largest relative difference of a gradient from eager float32."
    yield ""


def _packed_table(rows: Sequence[ZooRow], with_inductor: dict[str, ZooRow]) -> Iterator[str]:
    yield "| model | library | tokens run | FLOPs packed | gradient error | with inductor |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        other = with_inductor.get(row.model)
        error = "" if other is None else other.verdict
        if other is not None and other.gradient_error is not None:
            error = f"{other.verdict}, {other.gradient_error:.0e}"
        yield (
            f"| {row.model} | {row.library} | {row.tokens} of {row.raw_tokens} | {row.packed_share_of_all:.0%} | "
            f"{row.gradient_error:.0e} | {error} |"
        )


def _others_table(rows: Sequence[ZooRow]) -> Iterator[str]:
    yield "| model | result | FLOPs packed | code | line | reason |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        code = f"[{row.code}](troubleshooting.md#{row.code.lower()})" if row.code else ""
        line = f"`{row.line}`" if row.line else ""
        cells = (row.model, _MEANINGS[row.verdict], f"{row.packed_share_of_all:.0%}", code, line, _reason(row))
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _reason(row: ZooRow) -> str:
    if row.note is not None:
        return row.note
    first = next((item for item in row.expansions if not item.get("contracted")), None)
    return f"{first['op']}: {first['reason']}" if first else ""


def _left_out() -> Iterator[str]:
    yield "## Architectures that are left out"
    yield ""
    yield "transformers lists these under causal language models, too:"
    yield ""
    for reason, names in read_configurations()["left_out"].items():
        yield f"- {reason}: {', '.join(names)}."


def main(arguments: Sequence[Any]) -> None:
    """Write the page.

    Raises:
        InputError: The arguments are not the page and one or more records.
    """
    if len(arguments) < 2:
        raise InputError("expected the file to write and one or two files of `treefx doctor --zoo --out`")
    Path(arguments[0]).write_text(page([Path(argument) for argument in arguments[1:]]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
