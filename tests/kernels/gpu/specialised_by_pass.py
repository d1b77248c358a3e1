"""dk and dv as Triton's own pass once divided them between warps: right in this text, and not in what became of it.

The form that had this loop was removed, for it gave wrong results on an H100; it is here for the guard of barriers.
"""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import torch
import triton
import triton.language as tl

from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.small_launches import Launch

__all__ = ["backward_keys", "launch"]


@triton.jit
def backward_keys(
    Q,
    K,
    V,
    GradOut,
    Lse,
    Delta,
    GradK,
    GradV,
    tiles,
    count,
    queries,
    keys,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    RESHAPED: tl.constexpr,
):
    """Sums of one tile of keys, without a mask; queries and gradients are read as rows, or as members of tokens."""
    first = tl.program_id(0) * BLOCK_N
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    if RESHAPED:
        STEP: tl.constexpr = GROUP * WIDTH
        q_box = tl.make_tensor_descriptor(Q, [queries, GROUP, WIDTH], [STEP, WIDTH, 1], [TOKENS, GROUP, WIDTH])
        grad_box = tl.make_tensor_descriptor(GradOut, [queries, GROUP, WIDTH], [STEP, WIDTH, 1], [TOKENS, GROUP, WIDTH])
    else:
        q_box = tl.make_tensor_descriptor(Q, [queries * GROUP, WIDTH], [WIDTH, 1], [BLOCK_M, WIDTH])
        grad_box = tl.make_tensor_descriptor(GradOut, [queries * GROUP, WIDTH], [WIDTH, 1], [BLOCK_M, WIDTH])
    k_box = tl.make_tensor_descriptor(K, [keys, WIDTH], [WIDTH, 1], [BLOCK_N, WIDTH])
    v_box = tl.make_tensor_descriptor(V, [keys, WIDTH], [WIDTH, 1], [BLOCK_N, WIDTH])
    lse_box = tl.make_tensor_descriptor(Lse, [1, queries * GROUP], [queries * GROUP, 1], [1, BLOCK_M])
    delta_box = tl.make_tensor_descriptor(Delta, [1, queries * GROUP], [queries * GROUP, 1], [1, BLOCK_M])
    k, v = k_box.load([first, 0]), v_box.load([first, 0])
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for entry in tl.range(0, count, warp_specialize=True):
        block = tl.load(tiles + entry)
        if RESHAPED:
            q = q_box.load([block * TOKENS, 0, 0]).reshape([BLOCK_M, WIDTH])
            grad = grad_box.load([block * TOKENS, 0, 0]).reshape([BLOCK_M, WIDTH])
        else:
            q = q_box.load([block * BLOCK_M, 0])
            grad = grad_box.load([block * BLOCK_M, 0])
        lse = lse_box.load([0, block * BLOCK_M])
        minus_delta = delta_box.load([0, block * BLOCK_M])
        p = tl.exp2(tl.dot(k, tl.trans(q)) - lse)
        dv = tl.dot(p.to(V.dtype.element_ty), grad, dv)
        ds = p * tl.dot(v, tl.trans(grad), tl.broadcast_to(minus_delta, [BLOCK_N, BLOCK_M]))
        dk = tl.dot(ds.to(Q.dtype.element_ty), q, dk)
    places = (first + tl.arange(0, BLOCK_N))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(GradK + places, dk.to(GradK.dtype.element_ty))
    tl.store(GradV + places, dv.to(GradV.dtype.element_ty))


def launch(*, reshaped: bool) -> Launch:
    """Return a launch for one key head of four query heads and 64 features."""
    rows, keys = (torch.empty(count, 64, dtype=torch.bfloat16) for count in (1024, 256))
    numbers, tiles = torch.empty(1024), torch.zeros(16, dtype=torch.int32)
    tensors = {"Q": rows, "K": keys, "V": keys, "GradOut": rows, "Lse": numbers, "Delta": numbers}
    tensors |= {"GradK": keys, "GradV": keys, "tiles": tiles}
    sizes = {"count": 16, "queries": 256, "keys": 256, "GROUP": 4, "BLOCK_M": 64, "BLOCK_N": 128, "WIDTH": 64}
    return Launch(backward_keys, (2, 1), {**tensors, **sizes, "RESHAPED": reshaped}, Config(64, 128, 4, 2))
