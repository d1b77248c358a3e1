"""Define kernels without products: per-row inputs of the backward, and final sums."""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

from treefx.kernels.gpu.triton_tree.device import sums_offsets

__all__ = ["finish_queries", "prologue", "sum_parts"]

LOG2_E = tl.constexpr(1.4426950408889634)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["queries", "packed_rows"])
def prologue(
    Q,
    GradOut,
    Out,
    Lse,
    Delta,
    PackedQ,
    PackedGrad,
    PackedHalves,
    PackedLse,
    PackedDelta,
    SumsQ,
    q_batch,
    q_head,
    q_token,
    grad_batch,
    grad_head,
    grad_token,
    out_batch,
    out_head,
    out_token,
    queries,
    packed_rows,
    kv_heads,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write delta = sum over the features of grad_out * out, for the softmax's backward.

    And, where there is room for them, queries, gradients, minus delta and the log-sum-exp (times log2(e), infinite
    where a row sees nothing) in the order of the tiles' rows: row r of a key head is token r // GROUP, member
    r % GROUP. The last two as halves of one number, delta above, or by themselves. And zeros where gradients of the
    queries will be added up.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1) % kv_heads
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    token = row // GROUP
    valid = token < queries
    value = tl.arange(0, VALUE_FEATURES)
    inside = valid[:, None] & (value < VALUE_WIDTH)[None, :]
    out_row = batch * out_batch + token.to(tl.int64) * out_token + head.to(tl.int64) * out_head
    grad_row = batch * grad_batch + token.to(tl.int64) * grad_token + head.to(tl.int64) * grad_head
    out = tl.load(Out + out_row[:, None] + value[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GradOut + grad_row[:, None] + value[None, :], mask=inside, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out, 1)
    lse_row = (batch * kv_heads * GROUP + head) * queries + token
    tl.store(Delta + lse_row, delta, mask=valid)
    lse = tl.load(Lse + lse_row, mask=valid, other=float("-inf"))
    seen = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    place = tl.program_id(1).to(tl.int64) * packed_rows + row
    if PackedHalves is not None:
        halves = seen.to(tl.uint32, bitcast=True).to(tl.int64) | (-delta).to(tl.uint32, bitcast=True).to(tl.int64) << 32
        tl.store(PackedHalves + place, halves, mask=row < packed_rows)
    if PackedLse is not None:
        tl.store(PackedLse + place, seen, mask=row < packed_rows)
        tl.store(PackedDelta + place, -delta, mask=row < packed_rows)
    if SumsQ is not None:
        ROOM: tl.constexpr = triton.next_power_of_2(ROW_WIDTH)
        feature = tl.arange(0, ROOM)
        room = (row < packed_rows)[:, None] & (feature < ROW_WIDTH)[None, :]
        nothing = tl.zeros([ROWS, ROOM], tl.float32)
        tl.store(SumsQ + place[:, None] * ROW_WIDTH + feature[None, :], nothing, mask=room)
    if PackedQ is not None:
        place = tl.program_id(1).to(tl.int64) * queries * GROUP + row
        tl.store(PackedGrad + place[:, None] * VALUE_WIDTH + value[None, :], grad, mask=inside)
        q_row = batch * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
        copy_rows(Q, q_row, PackedQ, place, valid, WIDTH, FEATURES)


@triton.jit
def copy_rows(Source, source_row, Target, place, valid, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """Copy some rows to their places among dense ones."""
    feature = tl.arange(0, FEATURES)
    inside = valid[:, None] & (feature < WIDTH)[None, :]
    x = tl.load(Source + source_row[:, None] + feature[None, :], mask=inside, other=0.0)
    tl.store(Target + place[:, None] * WIDTH + feature[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["queries", "packed_rows", "factor"])
def finish_queries(
    SumsQ,
    GradQ,
    dq_batch,
    dq_head,
    dq_token,
    factor,
    queries,
    packed_rows,
    kv_heads,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of the queries from its sums, in their own order, times a factor."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1) % kv_heads
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    token = row // GROUP
    feature = tl.arange(0, FEATURES)
    inside = (token < queries)[:, None] & (feature < WIDTH)[None, :]
    # ROWS is a multiple of the rows that lie together.
    first = tl.program_id(1).to(tl.int64) * packed_rows + tl.program_id(0) * ROWS
    offsets = sums_offsets(tl.arange(0, ROWS)[:, None], feature[None, :], ROW_WIDTH)
    sums = tl.load(SumsQ + first * ROW_WIDTH + offsets, mask=inside, other=0.0)
    head = kv_head * GROUP + row % GROUP
    target = GradQ + batch * dq_batch + token.to(tl.int64) * dq_token + head.to(tl.int64) * dq_head
    tl.store(target[:, None] + feature[None, :], (sums * factor).to(GradQ.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["keys"])
def sum_parts(
    PartsK,
    PartsV,
    GradK,
    GradV,
    split,
    bounds,
    dk_batch,
    dk_head,
    dk_token,
    dv_batch,
    dv_head,
    dv_token,
    keys,
    kv_heads,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum ``[slots, batches and heads, BLOCK_N, WIDTH]`` over the slots of each cut block."""
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    GradK += batch * dk_batch + kv_head * dk_head
    GradV += batch * dv_batch + kv_head * dv_head
    sum_tensor(PartsK, GradK, split, bounds, dk_token, keys, BLOCK_N, WIDTH, FEATURES, ROWS)
    sum_tensor(PartsV, GradV, split, bounds, dv_token, keys, BLOCK_N, VALUE_WIDTH, VALUE_FEATURES, ROWS)


@triton.jit
def sum_tensor(
    Parts,
    Grad,
    split,
    bounds,
    grad_token,
    keys,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum some rows of one tensor in the order of the parts."""
    number = tl.program_id(0) // (BLOCK_N // ROWS)
    row = tl.program_id(0) % (BLOCK_N // ROWS) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    key = tl.load(split + number) * BLOCK_N + row
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    first = tl.load(bounds + number)
    for part in range(tl.load(bounds + number + 1) - first):
        place = (first + part).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        address = Parts + (place * BLOCK_N + row[:, None]) * WIDTH + feature[None, :]
        total += tl.load(address, mask=(feature < WIDTH)[None, :], other=0.0)
    address = Grad + key[:, None].to(tl.int64) * grad_token + feature[None, :]
    mask = (key < keys)[:, None] & (feature < WIDTH)[None, :]
    tl.store(address, total.to(Grad.dtype.element_ty), mask=mask)
