"""What the backward needs of every row of queries before its products, in one kernel."""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

__all__ = ["prologue"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["queries", "packed_rows"])
def prologue(
    Q,
    GradOut,
    Out,
    Lse,
    Delta,
    PackedQ,
    PackedGrad,
    PackedLse,
    PackedDelta,
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
    ROWS: tl.constexpr,
):
    """Write delta = sum over the features of grad_out * out: what the softmax takes from every gradient of its row.

    And, where there is room for them, queries, gradients, delta and the log-sum-exp (times log2(e), infinite where a
    row sees nothing) in the order of the tiles' rows: row r of a key head is token r // GROUP, member r % GROUP.
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
    if PackedLse is not None:
        lse = tl.load(Lse + lse_row, mask=valid, other=float("-inf"))
        seen = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        place = tl.program_id(1).to(tl.int64) * packed_rows + row
        tl.store(PackedLse + place, seen, mask=row < packed_rows)
        tl.store(PackedDelta + place, delta, mask=row < packed_rows)
    if PackedQ is not None:
        place = (tl.program_id(1).to(tl.int64) * queries * GROUP + row)[:, None]
        tl.store(PackedGrad + place * VALUE_WIDTH + value[None, :], grad, mask=inside)
        feature = tl.arange(0, FEATURES)
        inside_q = valid[:, None] & (feature < WIDTH)[None, :]
        q_row = batch * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
        q = tl.load(Q + q_row[:, None] + feature[None, :], mask=inside_q, other=0.0)
        tl.store(PackedQ + place * WIDTH + feature[None, :], q, mask=inside_q)
