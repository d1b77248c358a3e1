"""Device functions that every generated kernel calls; Triton inlines them."""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

from treefx.kernels.gpu.triton_tree.target import takes_ptx

__all__ = [
    "add_rows",
    "added_lines",
    "added_operands",
    "clamped",
    "floor_divide",
    "load_number",
    "load_rows",
    "own_before",
    "remainder",
    "seen_bits",
    "seen_in_tile_or_lowest",
    "seen_operands",
    "seen_or_lowest",
    "soft_weight",
    "softened",
    "store_rows",
    "sums_offsets",
    "tanh",
    "under",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MOST_BITS = tl.constexpr(64)
"""Queries of a tile; those of one thread are a fourth of them."""


@triton.jit
def load_rows(pointer, offsets, valid, START: tl.constexpr, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Load features [START, STOP) of some rows as ``[rows, WIDTH]``; others read 0.

    ``offsets`` is the first element of each row, ``valid`` a mask of rows or None.
    """
    feature = START + tl.arange(0, WIDTH)
    address = (pointer + feature[None, :]) + offsets[:, None]
    if START + WIDTH > STOP:
        if valid is None:
            tile = tl.load(address, mask=(feature < STOP)[None, :], other=0.0)
        else:
            tile = tl.load(address, mask=valid[:, None] & (feature < STOP)[None, :], other=0.0)
    elif valid is None:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=valid[:, None], other=0.0)
    return tile


@triton.jit
def store_rows(pointer, offsets, valid, tile, START: tl.constexpr, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Store features [START, STOP) of the valid rows."""
    feature = START + tl.arange(0, WIDTH)
    address = pointer + offsets[:, None] + feature[None, :]
    mask = valid[:, None] & (feature < STOP)[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def sums_offsets(row, feature, ROW_WIDTH: tl.constexpr):
    """Return where the sum of a row and a feature lies, of the rows of one key head.

    16 rows lie together, and of these 8 features; there in the order in which the threads of a warp hold what they have
    multiplied, a row and the eighth after it, two features of each: a thread adds 16 bytes at once, a warp 512, and
    nothing changes hands. The order belongs to rows and features alone, whatever the tiles.
    """
    block = row // 16 * (16 * ROW_WIDTH) + row % 8 * 16 + row % 16 // 8 * 2
    return block + feature // 8 * 128 + feature % 8 // 2 * 4 + feature % 2


@triton.jit
def add_rows(sums, first, tile, START: tl.constexpr, ROW_WIDTH: tl.constexpr):
    """Add a tile atomically to features from START on of the sums of rows.

    Args:
        sums: of the rows of a key head, in the order of :func:`sums_offsets`.
        first: where those of the tile's first row begin.
        tile: ``[rows, features]``, rows a multiple of 16, features too.
        START: the first feature, a multiple of 16.
        ROW_WIDTH: features of a row.
    """
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    # As eight warps of Hopper hold it: four blocks of 16 rows, two halves of the features.
    x = tl.reshape(tile, [ROWS // 16, 2, 8, 2, WIDTH // 16, 4, 2])
    x = tl.reshape(tl.permute(x, [4, 3, 0, 2, 5, 1, 6]), [ROWS * WIDTH // 4, 4])
    four = tl.arange(0, ROWS * WIDTH // 4)
    group = START // 8 + four // (2 * ROWS) % 2 * (WIDTH // 16) + four // (4 * ROWS)
    place = four // 32 % (ROWS // 16) * (16 * ROW_WIDTH) + group * 128 + four % 32 * 4
    # Offsets that change from tile to tile are added last, to loop invariants.
    tl.atomic_add((sums + (place[:, None] + tl.arange(0, 4)[None, :])) + first, x, sem="relaxed")


@triton.constexpr_function
def added_lines(count):
    """Return a block that adds a thread's numbers to sums in the order of :func:`sums_offsets`, 16 bytes at once.

    The numbers are those of two rows and of features that lie 8 apart, four of each 8. All addresses are that of the
    first four. An atomic addition would return what was there by way of the registers; this reduction returns nothing,
    and what the block has to return is 0.
    """
    lines = []
    for start in range(0, count, 4):
        numbers = ", ".join(f"${2 * count + start + part}" for part in range(4))
        lines.append(f"red.relaxed.gpu.global.add.v4.f32 [${count}+{128 * start}], {{{numbers}}}")
    lines += [f"mov.b32 ${number}, 0" for number in range(count)]
    return "{ " + "; ".join(lines) + "; }"


@triton.constexpr_function
def added_operands(count):
    """Return what kinds of registers :func:`added_lines` takes."""
    return ",".join(["=r"] * count + ["l"] * count + ["f"] * count)


@triton.jit
def load_number(numbers, entry, last=None):
    """Return a number of a list, 0 from ``last`` on.

    The entry is unsigned, so that the address is made of it: no pointer moves along, and nothing counts in 64 bits.
    """
    address = numbers + tl.full([], entry, tl.int32).to(tl.uint32, bitcast=True).to(tl.int64)
    if last is None:
        number = tl.load(address)
    else:
        number = tl.load(address, mask=entry < last, other=0)
    return number


@triton.jit
def under(query, low, size):
    """Return where ``low <= query < low + size``, by one unsigned comparison."""
    return (query - low).to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit
def seen_or_lowest(logit, query, low, size):
    """Return the logit where :func:`under` holds, minus infinity elsewhere.

    On NVIDIA's devices the comparison and the choice are one block: apart, LLVM gathers the bits of a tile's
    comparisons in registers and takes them out again, three instructions for each.
    """
    if INTERPRETED:
        result = tl.where(under(query, low, size), logit, float("-inf"))
    elif not takes_ptx():
        result = tl.where(under(query, low, size), logit, float("-inf"))
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.lt.u32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }",
            "=f,f,r,r",
            [logit, query - low, size],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.constexpr_function
def seen_bits(count):
    """Return a block for some logits, each kept if its bit is in a range.

    Operands are all results, all logits, all first ones, all others, and all bits. The logits of a thread's two keys
    take turns by pairs; here one key comes after the other, so that the assembler finds bits of one number in a row.
    """
    lines = []
    for number in sorted(range(count), key=lambda number: number % 4 // 2):
        result, logit, first, after, bit = (f"${number + part * count}" for part in range(5))
        lines += [f"shl.b32 bits, 0xFFFFFFFF, {first}", f"shl.b32 after, 0xFFFFFFFF, {after}", "not.b32 after, after"]
        lines += ["and.b32 bits, bits, after", f"and.b32 bits, bits, {bit}", "setp.ne.u32 seen, bits, 0"]
        lines += [f"selp.f32 {result}, {logit}, 0fFF800000, seen"]
    return "{ .reg .pred seen; .reg .b32 bits, after; " + "; ".join(lines) + "; }"


@triton.constexpr_function
def seen_operands(count):
    """Return what kinds of registers :func:`seen_bits` takes."""
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * (3 * count))


@triton.jit
def seen_in_tile_or_lowest(logit, query, start, low, size, ROWS: tl.constexpr, QUERIES: tl.constexpr):
    """Return what :func:`seen_or_lowest` does for the queries ``start + query`` of one tile.

    The queries of a tile that see a key lie side by side. On a device they are bits of one number, made once for all
    logits of a key, which move to predicates seven at once. A thread's columns lie 8 apart but for pairs, and are the
    same for all threads but for what their lowest bits say: that is taken off the bounds, not off the bits. So are the
    columns of other threads: bits are numbered by the queries of one thread, and bounds count these.

    Args:
        logit: ``[keys, columns]``.
        query: ``[1, columns]``, counted from the tile's first.
        start: the tile's first, a multiple of QUERIES.
        low: ``[keys, 1]``, like ``size``.
        size: as in :func:`under`.
        ROWS: columns that have one query.
        QUERIES: queries of the tile; 0 if ``query`` is not counted so.
    """
    if QUERIES == 0 or QUERIES > _MOST_BITS:
        result = seen_or_lowest(logit, query, low - start, size)
    else:
        STEP: tl.constexpr = 8 // ROWS if ROWS < 8 else 1  # queries that eight columns have, of all threads
        OWN: tl.constexpr = 2 if ROWS == 1 else 1  # of one thread
        aside = query & (STEP - OWN)
        place = own_before(query - aside, STEP, OWN)
        before = start // STEP * OWN
        first = tl.maximum(own_before(low - aside, STEP, OWN) - before, 0)
        after = tl.maximum(own_before(low + size - aside, STEP, OWN) - before, 0)
        if INTERPRETED:
            result = tl.where((first <= place) & (place < after), logit, float("-inf"))
        elif not takes_ptx():
            result = seen_or_lowest(logit, query, low - start, size)
        else:
            OF_THREAD: tl.constexpr = logit.shape[1] // 2  # where warp groups multiply; it may have fewer elsewhere
            result = tl.inline_asm_elementwise(
                seen_bits(OF_THREAD),
                seen_operands(OF_THREAD),
                [logit, first, after, 1 << place],
                dtype=tl.float32,
                is_pure=True,
                pack=OF_THREAD,
            )
    return result


@triton.jit
def own_before(query, STEP: tl.constexpr, OWN: tl.constexpr):
    """Return how many of the first OWN queries of every STEP, a power of two, come before one."""
    return (query & -STEP) // STEP * OWN + tl.minimum(query & (STEP - 1), OWN)


@triton.jit
def softened(logit):
    """Return the logit times log2(e); finite logits stay finite, so masks stay soft."""
    finite = tl.maximum(logit, -2.3e38, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634
    return tl.where(logit == float("-inf"), logit, finite)


@triton.jit
def soft_weight(difference):
    """Return the weight of a soft logit less its row's log-sum-exp: at most 1, or NaN.

    Where only the lowest number was seen, it rounds more coarsely than 1.
    """
    return tl.exp2(tl.minimum(difference, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def tanh(x):
    """Return tanh, accurate to float32 near 0 too, where 1 - 2 / (1 + exp(2 x)) cancels."""
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    return tl.where(tl.abs(x) < 0.15, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


@triton.jit
def floor_divide(a, b, FLOATING: tl.constexpr):
    """Return floor(a / b), as torch does; Triton's own division of integers rounds toward 0."""
    if FLOATING:
        result = tl.floor(a / b)
    else:
        quotient = a // b
        rest = a - quotient * b
        result = quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(quotient.dtype)
    return result


@triton.jit
def remainder(a, b, FLOATING: tl.constexpr):
    """Return ``a - floor(a / b) * b``."""
    return a - floor_divide(a, b, FLOATING) * b


@triton.jit
def clamped(index, size):
    """Return an index into ``size`` elements; negative ones count from the end."""
    index = tl.minimum(tl.maximum(index, -size), size - 1)
    return tl.where(index < 0, index + size, index)
