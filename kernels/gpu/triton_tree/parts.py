"""The second step of a list that was cut: adding the sums of its parts, in their order."""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

__all__ = ["sum_parts"]


@triton.jit(do_not_specialize=["keys", "parts"])
def sum_parts(
    PartsK,
    PartsV,
    GradK,
    GradV,
    split,
    dk_batch,
    dk_head,
    dk_token,
    dv_batch,
    dv_head,
    dv_token,
    keys,
    kv_heads,
    parts,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write ``[slots, batches and heads, BLOCK_N, WIDTH]`` summed over the parts of each block that was cut."""
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    GradK += batch * dk_batch + kv_head * dk_head
    GradV += batch * dv_batch + kv_head * dv_head
    sum_tensor(PartsK, GradK, split, dk_token, keys, parts, BLOCK_N, WIDTH, FEATURES, ROWS)
    sum_tensor(PartsV, GradV, split, dv_token, keys, parts, BLOCK_N, VALUE_WIDTH, VALUE_FEATURES, ROWS)


@triton.jit
def sum_tensor(
    Parts,
    Grad,
    split,
    grad_token,
    keys,
    parts,
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
    for part in range(parts):
        slot = (number * parts + part).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        address = Parts + (slot * BLOCK_N + row[:, None]) * WIDTH + feature[None, :]
        total += tl.load(address, mask=(feature < WIDTH)[None, :], other=0.0)
    address = Grad + key[:, None].to(tl.int64) * grad_token + feature[None, :]
    mask = (key < keys)[:, None] & (feature < WIDTH)[None, :]
    tl.store(address, total.to(Grad.dtype.element_ty), mask=mask)
