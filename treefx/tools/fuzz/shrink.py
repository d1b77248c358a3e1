"""Shrink a program while it fails in the same way, greedily, largest cuts first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from treefx.tools.fuzz.program import Attention, Batch, Call, Program, Sizes

__all__ = ["shrink", "smaller"]

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("modes", ()),
    ("head", "linear"),
    ("loss", "cross entropy"),
    ("labels", "padding ignored"),
    ("output", "loss and logits"),
    ("output", "loss"),
    ("inputs", 0),
    ("inner", "aot_eager"),
    ("inner", "eager"),
    ("sizes", Sizes(4, 1, 1, 24)),
    ("sizes", Sizes(8, 2, 2, 24)),
)


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 60) -> Program:
    """The smallest program found that still fails.

    Args:
        program: One that fails.
        fails: Whether a program fails in the same way.
        tries: How many programs may be run.
    """
    tried = {program}
    while tries > 0:
        for candidate in smaller(program):
            if candidate in tried or tries <= 0:
                continue
            tried.add(candidate)
            tries -= 1
            if fails(candidate):
                program = candidate
                break
        else:
            return program
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first; some of them do not run."""
    yield from _fewer_calls(program)
    for name in ("layers", "embeddings"):
        items = getattr(program, name)
        for place in range(int(name == "embeddings"), len(items)):
            yield replace(program, **{name: items[:place] + items[place + 1 :]})
    plainer = {name: plain for name, plain in _PLAIN if plain != "aot_eager"} | {"output": program.output}
    yield replace(program, **plainer)
    for name, plain in _PLAIN:
        if getattr(program, name) != plain and (plain, program.inner) != ("aot_eager", "eager"):
            yield replace(program, **{name: plain})
    if program.embeddings[0] != "embedding":
        yield replace(program, embeddings=("embedding", *program.embeddings[1:]))
    for place, layer in enumerate(program.layers):
        if isinstance(layer, Attention):
            for simpler in _simpler(layer):
                yield replace(program, layers=(*program.layers[:place], simpler, *program.layers[place + 1 :]))
    yield from _smaller_batches(program)


def _fewer_calls(program: Program) -> Iterator[Program]:
    calls = program.calls
    if len(calls) > 2:
        yield from (replace(program, calls=(call,)) for call in calls)
    if len(calls) > 1:
        yield from (replace(program, calls=calls[:place] + calls[place + 1 :]) for place in range(len(calls)))
    for place, call in enumerate(calls):
        if call.name.startswith("train") and call.name != "train":
            yield replace(program, calls=(*calls[:place], Call("train", call.batch), *calls[place + 1 :]))


def _simpler(layer: Attention) -> Iterator[Attention]:
    for place in range(len(layer.terms)):
        yield replace(layer, terms=layer.terms[:place] + layer.terms[place + 1 :])
    for place in range(len(layer.conditions)):
        yield replace(layer, conditions=layer.conditions[:place] + layer.conditions[place + 1 :])
    for name, plain in (("spelling", "sdpa"), ("spelling", "matmul"), ("written", "bool"), ("fill", "-inf")):
        if getattr(layer, name) != plain and not (plain == "matmul" and layer.spelling == "sdpa"):
            changed: Any = {name: plain}
            yield replace(layer, **changed)


def _smaller_batches(program: Program) -> Iterator[Program]:
    if len(program.batches) > 1:
        for batch in program.batches:
            yield replace(program, batches=(batch,), calls=tuple(Call(call.name) for call in program.calls))
    rows, columns = (min(sizes) for sizes in zip(*map(_shape, program.batches), strict=True))
    for row in range(rows if rows > 1 else 0):
        yield _with_batches(program, functools.partial(_without_row, row=row))
    for width in sorted({columns // 2, columns - 1}):
        if width >= 2:
            yield _with_batches(program, functools.partial(_cut, width=width))
            yield _with_batches(program, functools.partial(_cut, width=-width))
    if any(0 in row for batch in program.batches for row in batch.mask):
        yield _with_batches(program, _unpadded)


def _shape(batch: Batch) -> tuple[int, int]:
    return len(batch.ids), len(batch.ids[0])


def _with_batches(program: Program, change: Callable[[Batch], Batch]) -> Program:
    return replace(program, batches=tuple(map(change, program.batches)))


def _without_row(batch: Batch, row: int) -> Batch:
    return replace(batch, ids=batch.ids[:row] + batch.ids[row + 1 :], mask=batch.mask[:row] + batch.mask[row + 1 :])


def _cut(batch: Batch, width: int) -> Batch:
    """The first columns, or with a negative width the last ones."""
    part = slice(width) if width > 0 else slice(width, None)
    return replace(batch, ids=tuple(row[part] for row in batch.ids), mask=tuple(row[part] for row in batch.mask))


def _unpadded(batch: Batch) -> Batch:
    """All tokens real; those of the padding become ordinary ones."""
    ids = tuple(tuple(token or 1 for token in row) for row in batch.ids)
    return replace(batch, ids=ids, mask=tuple(tuple(1 for _ in row) for row in batch.mask))
