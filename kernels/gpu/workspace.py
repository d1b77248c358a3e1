"""Count bytes that tree attention allocates on a device, besides arguments and results.

The sizes of an attention are numbers, or symbols of a planner that does not know them yet. Of numbers the bytes are
those that the launches take: exactly, where the score reads nothing of one query or key alone. Of symbols they are a
polynomial that is never less, for non-negative symbols.

============  ==========================================================================================================
forward       output and log-sum-exp of a boundary in float32, and both
backward      Q and the gradient in the order of rows (several heads per group), log-sum-exp and delta twice, the sums
              of lists of tiles that were cut, and both; in one pass the sums of dq in float32, in two passes
              dq of a boundary in float32
both          values of the score per row and per key, descriptors, of Gluon
============  ==========================================================================================================

Lists of tiles stay for all layers of a forest, and so do a score's values of it: :func:`list_bytes`,
:func:`value_bytes`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from treefx.kernels.gpu.triton_tree.arguments import padded_length
from treefx.kernels.gpu.triton_tree.codegen import row_vectors, row_width
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.small_launches import scratch_bytes
from treefx.kernels.gpu.triton_tree.support import processors, programs_per_head
from treefx.kernels.memory import ALIGNED
from treefx.kernels.tiles.key_programs import MOST_SLOTS
from treefx.kernels.tiles.tree_blocks import TreeBlocks

__all__ = ["Lists", "Number", "backward_bytes", "forward_bytes", "list_bytes", "most_lists", "most_of", "value_bytes"]

Number: TypeAlias = Any
"""An int, or an expression in symbols."""
_WORD = 4
"""Bytes of float32 and int32."""
_OPERATION = 8
"""Bytes per element of an operation while values of the score are made."""
_COPIES = 4
"""Of such a value, in 32 bits: of its type, for every head, in the order of the tiles, with rows that start aligned."""


@dataclass(frozen=True)
class Lists:
    """Hold the sizes of tile lists of one source of keys.

    Attributes:
        keys: how many, up to whole tiles.
        query_blocks: tiles of queries.
        key_blocks: tiles of keys.
        tiles: those in the lists, of one direction.
        programs: of the kernel of dk and dv.
        split: lists that are cut.
        slots: parts of these.
        has_low: whether keys are those of a boundary.
    """

    keys: Number
    query_blocks: Number
    key_blocks: Number
    tiles: Number
    programs: Number
    split: Number
    slots: Number
    has_low: bool = False

    @classmethod
    def of(cls, blocks: TreeBlocks) -> "Lists":
        """Count lists that were made."""
        work = blocks.key_programs
        return cls(
            keys=len(blocks.size),
            query_blocks=len(blocks.by_query.order),
            key_blocks=len(blocks.by_key.order),
            tiles=len(blocks.by_key.tiles),
            programs=len(work.order),
            split=len(work.split),
            slots=work.slots,
            has_low=blocks.low is not None,
        )


def most_lists(rows: Number, keys: Number, block_m: int, block_n: int, *, group: int, is_boundary: bool) -> Lists:
    """Return lists that are nowhere shorter than those of any forest.

    Args:
        rows: queries times the heads of a group.
        keys: those of the boundary, or as many as there are queries.
        block_m: rows of a tile.
        block_n: keys of a tile.
        group: query heads per key head.
        is_boundary: whether any query may see any key; own keys are seen by later queries only.
    """
    query_blocks, key_blocks = _blocks(rows, block_m), _blocks(keys, block_n)
    if is_boundary:
        tiles = query_blocks * key_blocks
    else:
        # Block j meets the blocks of rows from j * step on, (rows / block_m + 2 - j * step) of them at most; the sum
        # over j is a parabola in the number of blocks, whose top this is.
        step = block_n * group / block_m
        tiles = step / 2 * (keys / block_n + 2 / step + 0.5) ** 2
    split = MOST_SLOTS // 2
    whole = key_blocks * block_n
    return Lists(whole, query_blocks, key_blocks, tiles, key_blocks + MOST_SLOTS, split, MOST_SLOTS, is_boundary)


def list_bytes(lists: Lists) -> Number:
    """Return the bytes of the lists of a source, in one configuration of one kernel."""
    sides = [(blocks, blocks + 1, blocks, lists.tiles) for blocks in (lists.query_blocks, lists.key_blocks)]
    programs = (lists.programs,) * 5
    of_keys = [lists.keys] * (2 if lists.has_low else 1)
    lengths = [*of_keys, *(length for side in sides for length in side), *programs, lists.split, lists.split + 1]
    return _WORD * ALIGNED * sum(_blocks(length, ALIGNED) for length in lengths)


def value_bytes(attention: Attention, tokens: Number, keys: Number) -> Number:
    """Return the bytes of a score's values per row or key; the forest's stay for all layers.

    Args:
        attention: on the path ``"gluon"``.
        tokens: queries.
        keys: of all sources.
    """
    values = [len(attention.code.row_values), len(attention.code.column_values)]
    rows = values[0] * _heads(attention) * _padded(tokens * attention.group)
    return _WORD * (rows + values[1] * attention.inputs.q.shape[0] * _padded(keys))


def forward_bytes(attention: Attention, tokens: Number, sources: Sequence[Lists], *, carries: bool) -> Number:
    """Return the most bytes that a forward holds at once.

    Args:
        attention: its heads, types, score, path and configurations; its tensors may be fake ones.
        tokens: queries.
        sources: of the keys that are attended to, in this order; lists of the configuration.
        carries: whether there is more than one of them.
    """
    count, rows = _heads(attention), tokens * attention.group
    carried = rows * count * (attention.request.value_dim + 1) * _WORD if carries else 0
    kept, made = _values(attention, tokens, sources)
    launched = most_of(_descriptors(attention, lists, _sharing(attention, lists), "forward") for lists in sources)
    return kept + most_of([made, carried + launched])


def backward_bytes(
    attention: Attention, tokens: Number, sources: Sequence[Sequence[Lists]], *, carries: bool
) -> Number:
    """Return the most bytes that a backward holds at once.

    Args:
        attention: as in the forward; in one pass or in two.
        tokens: queries.
        sources: of every source of keys the lists for dk and dv, and those for dq, which one pass does not read.
        carries: whether there is more than one of them.
    """
    q, request = attention.inputs.q, attention.request
    count, rows = _heads(attention), tokens * attention.group
    copies = rows * (request.head_dim + request.value_dim) * q.element_size() if attention.group > 1 else 0
    carried = count * rows * request.head_dim * _WORD if carries else 0
    laid = count * (copies + sum(row_vectors(attention.path).values()) * _padded(rows) * _WORD)
    sums = _padded(rows) * row_width(request.head_dim, request.chunk_widths) * _WORD if attention.once else 0
    kept, made = _values(attention, tokens, [lists for lists, _ in sources])
    found, kernel = [], attention.of_keys
    for of_keys, of_queries in sources:
        widths = request.head_dim + request.value_dim if of_keys.slots != 0 else 2
        slots = of_keys.slots if of_keys.slots != 0 else 1
        parts = count * (sums + slots * attention.config(kernel).block_n * widths * _WORD)
        found.append(laid + parts + _descriptors(attention, of_keys, of_keys.programs, kernel))
        if not attention.once:  # the plain kernel of dq reads its rows in place
            programs = _sharing(attention, of_queries)
            descriptors = _descriptors(attention, of_queries, programs, "backward_queries")
            found.append(carried + (0 if attention.path == "plain" else laid) + descriptors)
    return kept + most_of([made, count * rows * _WORD + most_of(found)])


def _sharing(attention: Attention, lists: Lists) -> Number:
    """Return how many programs share the lists of a key head in Gluon, at most the lists."""
    if not isinstance(lists.query_blocks, int) or not isinstance(lists.tiles, int):
        return lists.query_blocks
    count = processors(attention.inputs.q.device)
    return programs_per_head(lists.query_blocks, lists.tiles, _heads(attention), count)


def _descriptors(attention: Attention, lists: Lists, programs: Number, kernel: str) -> Number:
    """Return the bytes of the descriptors that one launch makes."""
    if attention.path == "plain":
        return 0
    return programs * _heads(attention) * scratch_bytes(getattr(attention.module, kernel), has_low=lists.has_low)


def _values(attention: Attention, tokens: Number, sources: Sequence[Lists]) -> tuple[Number, Number]:
    """Return the bytes of a score's values, and of the forest's while they are made."""
    if attention.path == "plain" or not (attention.code.row_values or attention.code.column_values):
        return 0, 0
    batch, heads = attention.inputs.q.shape[0], attention.inputs.q.shape[1]
    keys = sum(_padded(lists.keys) for lists in sources)
    made = _OPERATION * _results(attention) * (tokens + keys) + _WORD * _COPIES * (heads * tokens + keys)
    return value_bytes(attention, tokens, keys), batch * made


def _results(attention: Attention) -> int:
    """Return the most results held for all heads while one value of the score is made."""
    expressions = [value.expr for side in ("row", "column") for value in getattr(attention.code, f"{side}_values")]
    heads = attention.inputs.q.shape[1]
    return max(_size(expr) * (heads if _mentions(expr, "head") else 1) for expr in expressions)


def _size(expr: Any) -> int:
    return 1 + sum(_size(item) for item in expr if isinstance(item, tuple))


def _mentions(expr: Any, name: str) -> bool:
    return expr[0] == name or any(_mentions(item, name) for item in expr if isinstance(item, tuple))


def _heads(attention: Attention) -> int:
    """Return key heads of all elements of the batch."""
    return int(attention.inputs.q.shape[0] * attention.inputs.k.shape[1])


def _padded(length: Number) -> Number:
    return padded_length(length) if isinstance(length, int) else length + padded_length(1)


def _blocks(length: Number, size: int) -> Number:
    return -(-length // size) if isinstance(length, int) else length / size + 1


def most_of(figures: Iterable[Number]) -> Number:
    """Return the largest number; for polynomials, the largest coefficients."""
    found = list(figures)
    if all(isinstance(figure, int) for figure in found):
        return max(found)
    largest: dict[Any, Any] = {}
    for figure in found:
        for monomial, factor in sympy.expand(figure).as_coefficients_dict().items():
            largest[monomial] = max(largest.get(monomial, 0), factor)
    return sympy.Add(*(factor * monomial for monomial, factor in largest.items()))
