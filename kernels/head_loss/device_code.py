"""Define Triton kernels on one chunk of raw products of hidden states and head.

A chunk is ``[rows, width]``.

With x an entry, y = x + bias and z = outer * tanh(inner * y) under a cap, z = outer * y without one.
A chunk's rows lie ``step`` entries apart; columns from ``width`` to ``loaded`` exist, with any content.
"""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

from treefx.kernels.gpu.triton_tree.device import tanh

__all__ = ["fold_chunk", "soften_chunk", "write_picks"]


@triton.jit
def logit(x, bias, inner, outer, CAPPED: tl.constexpr):
    """Return z of raw products."""
    y = x.to(tl.float32)
    if bias is not None:
        y += bias.to(tl.float32)
    if CAPPED:
        z = outer * tanh(inner * y)
    else:
        z = outer * y
    return z


@triton.jit
def cap_slope(z, outer, CAPPED: tl.constexpr):
    """Return (1 - tanh^2) of a capped logit, 1 of others."""
    if CAPPED:
        share = z / outer
        slope = 1.0 - share * share
    else:
        slope = 1.0
    return slope


@triton.jit
def finite_base(top):
    """Return a maximum that numbers may be reduced by: -inf - (-inf) would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["rows", "start", "width", "picks", "inner", "outer"])
def fold_chunk(
    Raw,
    Bias,
    Top,
    Sum,
    Moment,
    Slot,
    Token,
    Chosen,
    step,
    rows,
    start,
    width,
    loaded,
    picks,
    inner,
    outer,
    CAPPED: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    PICKS: tl.constexpr,
):
    """Fold a chunk into each row's maximum and sums; read the picked logits.

    Sums are of the exponentials, and of z times those.

    The first ``rows`` programs have a row each. Each lane keeps a maximum and a sum, so that lanes exchange nothing
    before the row's end. The other programs have PICKS picks each, and write those of this chunk.
    """
    program = tl.program_id(0)
    if program < rows:
        column = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        row = Raw + program.to(tl.int64) * step
        top = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        moment = tl.zeros([LANES], tl.float32)
        for first in range(0, width, LANES * EACH):
            here = column + first
            x = tl.load(row + here, mask=here < loaded, other=0.0)
            bias = None
            if Bias is not None:
                bias = tl.load(Bias + start + here, mask=here < width, other=0.0)
            z = tl.where(here < width, logit(x, bias, inner, outer, CAPPED), float("-inf"))
            higher = tl.maximum(top, tl.max(z, 1))
            base = finite_base(higher)
            weight = tl.exp(z - base[:, None])
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weight, 1)
            if Moment is not None:
                moment = moment * shrink + tl.sum(tl.where(weight > 0, weight * z, 0.0), 1)
            top = higher
        before = tl.load(Top + program)
        higher = tl.maximum(before, tl.max(top, 0))
        base = finite_base(higher)
        shrink = tl.exp(before - base)
        share = tl.exp(top - base)
        tl.store(Sum + program, tl.load(Sum + program) * shrink + tl.sum(total * share, 0))
        if Moment is not None:
            tl.store(Moment + program, tl.load(Moment + program) * shrink + tl.sum(moment * share, 0))
        tl.store(Top + program, higher)
    else:
        pick = (program - rows) * PICKS + tl.arange(0, PICKS)
        slot = tl.load(Slot + pick, mask=pick < picks, other=-1)
        entry = tl.load(Token + pick, mask=pick < picks, other=-1) - start
        inside = (slot >= 0) & (entry >= 0) & (entry < width)
        x = tl.load(Raw + slot * step + entry, mask=inside, other=0.0)
        bias = None
        if Bias is not None:
            bias = tl.load(Bias + start + entry, mask=inside, other=0.0)
        tl.store(Chosen + pick, logit(x, bias, inner, outer, CAPPED), mask=inside)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["start", "width", "inner", "outer", "slope"])
def soften_chunk(
    Raw,
    Out,
    Bias,
    Lse,
    Total,
    Entropy,
    OfEntropy,
    step,
    out_step,
    start,
    width,
    loaded,
    inner,
    outer,
    slope,
    CAPPED: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Write exp(z - lse) * total * dz/dx of every entry, in place where Out is Raw.

    With the gradient h of a row's entropy H, total becomes total - h * (z - lse + H). A row whose gradients are all 0
    is not read: its entries get 0.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * LANES * EACH
    here = first + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    total = tl.load(Total + program)
    of_entropy = 0.0
    if OfEntropy is not None:
        of_entropy = tl.load(OfEntropy + program)
    grad = tl.zeros([LANES, EACH], tl.float32)
    if (total != 0.0) | (of_entropy != 0.0):
        x = tl.load(Raw + program * step + here, mask=here < loaded, other=0.0)
        bias = None
        if Bias is not None:
            bias = tl.load(Bias + start + here, mask=here < width, other=0.0)
        z = logit(x, bias, inner, outer, CAPPED)
        logp = z - tl.load(Lse + program)
        factor = total
        weight = tl.exp(logp)
        if OfEntropy is not None:
            # 0 * -inf would be NaN where an entry is forbidden.
            factor = total - tl.where(weight == 0.0, 0.0, of_entropy * (logp + tl.load(Entropy + program)))
        grad = weight * factor * slope * cap_slope(z, outer, CAPPED)
    tl.store(Out + program * out_step + here, grad.to(Out.dtype.element_ty), mask=here < loaded)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["rows", "start", "width", "chunk", "outer", "slope"])
def write_picks(
    Out,
    Key,
    End,
    Bounds,
    Grad,
    Loss,
    Lse,
    Total,
    Entropy,
    OfEntropy,
    out_step,
    rows,
    start,
    width,
    chunk,
    outer,
    slope,
    CAPPED: tl.constexpr,
    PICKS: tl.constexpr,
):
    """Write the gradients of the entries that picks of one chunk name, each rounded once.

    Picks are sorted by their keys, token * rows + row: equal ones lie together, up to End, and the first of them writes
    (probability * total - sum of their gradients) * dz/dx. Those of chunk c are Bounds[c] to before Bounds[c + 1].
    """
    first = tl.load(Bounds + chunk) + tl.program_id(0)
    for pick in range(first, tl.load(Bounds + chunk + 1), tl.num_programs(0)):
        key = tl.load(Key + pick)
        if key != tl.load(Key + pick - 1, mask=pick > 0, other=-1):
            end = tl.load(End + pick)
            sums = tl.zeros([PICKS], tl.float32)
            for other in range(pick, end, PICKS):
                equal = other + tl.arange(0, PICKS)
                sums += tl.load(Grad + equal, mask=equal < end, other=0.0)
            entry = key // rows
            row = key - entry * rows
            loss = tl.load(Loss + pick)
            factor = tl.load(Total + row)
            weight = tl.exp(-loss)
            if OfEntropy is not None:
                change = tl.load(OfEntropy + row) * (tl.load(Entropy + row) - loss)
                factor -= tl.where(weight == 0.0, 0.0, change)
            grad = (weight * factor - tl.sum(sums, 0)) * slope
            grad *= cap_slope(tl.load(Lse + row) - loss, outer, CAPPED)
            column = entry - start
            inside = (column >= 0) & (column < width)  # always, where keys are sorted
            tl.store(Out + row * out_step + column, grad.to(Out.dtype.element_ty), mask=inside)
