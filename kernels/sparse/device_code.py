"""Define Triton kernels of attention to listed keys.

A program of ``attend_listed`` and ``restore_queries`` has one query and one key head: it walks the query's list, a
block of keys at a time, for ROWS query heads of the group. A program of ``restore_keys`` has one key: it walks the
queries that list it, so nothing is added up across programs. Where many heads share a key, ``restore_queries`` adds to
the gradients of keys instead, by products of tensor cores, in no fixed order.

Rows of tensors are dense; heads and tokens lie at any distance.
"""

# Annotations would be evaluated by Triton: parameters are tensors, and constants where marked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
import triton
import triton.language as tl

__all__ = ["attend_listed", "restore_keys", "restore_queries"]


@triton.jit
def rows_of(X, row, head_step, token, token_step, feature, width, inside):
    """Load ``[rows, features]``: heads of one token, or tokens of one head."""
    at = row.to(tl.int64)[:, None] * head_step + token * token_step + feature[None, :]
    return tl.load(X + at, mask=inside[:, None] & (feature < width)[None, :], other=0.0)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["tokens", "listed", "scale"])
def attend_listed(
    Q,
    K,
    V,
    Keys,
    Sinks,
    Out,
    Lse,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    out_head,
    out_token,
    tokens,
    listed,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the output and the log-sum-exp of a query's heads, over its listed keys."""
    query = tl.program_id(0).to(tl.int64)
    key_head = (tl.program_id(1) // SPLITS).to(tl.int64)
    row = tl.program_id(1) % SPLITS * ROWS + tl.arange(0, ROWS)
    here = row < GROUP
    head = key_head * GROUP + row
    feature = tl.arange(0, BLOCK_WIDTH)
    value_feature = tl.arange(0, BLOCK_VALUES)
    q = rows_of(Q, head, q_head, query, q_token, feature, WIDTH, here)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if Sinks is not None:
        top = tl.load(Sinks + head, mask=here, other=0.0).to(tl.float32)
        total += tl.where(top == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([ROWS, BLOCK_VALUES], tl.float32)
    for first in range(0, listed, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        key = tl.load(Keys + query * listed + place, mask=place < listed, other=-1)
        seen = key >= 0
        k = rows_of(K + key_head * k_head, key, k_token, 0, 0, feature, WIDTH, seen)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        v = rows_of(V + key_head * v_head, key, v_token, 0, 0, value_feature, VALUES, seen)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    none = total == 0.0
    out = sums / tl.where(none, 1.0, total)[:, None]
    at = Out + head[:, None] * out_head + query * out_token + value_feature[None, :]
    tl.store(at, out.to(Out.dtype.element_ty), mask=here[:, None] & (value_feature < VALUES)[None, :])
    lse = tl.where(none, float("-inf"), top + tl.log(tl.where(none, 1.0, total)))
    tl.store(Lse + head * tokens + query, lse, mask=here)


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["tokens", "listed", "scale"])
def restore_queries(
    Q,
    K,
    V,
    Keys,
    Grad,
    Lse,
    Delta,
    OfQ,
    OfK,
    OfV,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    grad_head,
    grad_token,
    of_head,
    of_token,
    of_k_head,
    of_k_token,
    of_v_head,
    of_v_token,
    tokens,
    listed,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of a query's heads, or add its part to the gradients of its keys and values.

    OfQ is None, or OfK and OfV are: together their sums would not fit into registers.
    """
    query = tl.program_id(0).to(tl.int64)
    key_head = (tl.program_id(1) // SPLITS).to(tl.int64)
    row = tl.program_id(1) % SPLITS * ROWS + tl.arange(0, ROWS)
    here = row < GROUP
    head = key_head * GROUP + row
    feature = tl.arange(0, BLOCK_WIDTH)
    value_feature = tl.arange(0, BLOCK_VALUES)
    q = rows_of(Q, head, q_head, query, q_token, feature, WIDTH, here)
    grad = rows_of(Grad, head, grad_head, query, grad_token, value_feature, VALUES, here)
    lse = tl.load(Lse + head * tokens + query, mask=here, other=0.0)
    delta = tl.load(Delta + head * tokens + query, mask=here, other=0.0)
    sums = tl.zeros([ROWS, BLOCK_WIDTH], tl.float32)
    for first in range(0, listed, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        key = tl.load(Keys + query * listed + place, mask=place < listed, other=-1)
        seen = key >= 0
        k = rows_of(K + key_head * k_head, key, k_token, 0, 0, feature, WIDTH, seen)
        v = rows_of(V + key_head * v_head, key, v_token, 0, 0, value_feature, VALUES, seen)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        weight = tl.where(here[:, None] & seen[None, :], tl.exp(score - lse[:, None]), 0.0)
        of_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        of_score = weight * (of_weight - delta[:, None]) * scale
        if OfQ is not None:
            sums += tl.dot(of_score.to(k.dtype), k, input_precision=PRECISION)
        if OfK is not None:
            of_k = tl.dot(tl.trans(of_score.to(q.dtype)), q, input_precision=PRECISION)
            at = OfK + key_head * of_k_head + key.to(tl.int64)[:, None] * of_k_token + feature[None, :]
            tl.atomic_add(at, of_k, mask=seen[:, None] & (feature < WIDTH)[None, :], sem="relaxed")
            of_v = tl.dot(tl.trans(weight.to(grad.dtype)), grad, input_precision=PRECISION)
            at = OfV + key_head * of_v_head + key.to(tl.int64)[:, None] * of_v_token + value_feature[None, :]
            tl.atomic_add(at, of_v, mask=seen[:, None] & (value_feature < VALUES)[None, :], sem="relaxed")
    if OfQ is not None:
        at = OfQ + head[:, None] * of_head + query * of_token + feature[None, :]
        tl.store(at, sums.to(OfQ.dtype.element_ty), mask=here[:, None] & (feature < WIDTH)[None, :])


# Long: its arguments take one line each.
@triton.jit(do_not_specialize=["tokens", "scale"])
def restore_keys(
    Q,
    K,
    V,
    Queries,
    Bounds,
    Grad,
    Lse,
    Delta,
    OfK,
    OfV,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    grad_head,
    grad_token,
    of_k_head,
    of_k_token,
    of_v_head,
    of_v_token,
    tokens,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """Write the gradients of a key and its value, over the queries from Bounds[key] to Bounds[key + 1]."""
    key = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, BLOCK_WIDTH)
    value_feature = tl.arange(0, BLOCK_VALUES)
    k = tl.load(K + key_head * k_head + key * k_token + feature, mask=feature < WIDTH, other=0.0).to(tl.float32)
    v = tl.load(V + key_head * v_head + key * v_token + value_feature, mask=value_feature < VALUES, other=0.0)
    v = v.to(tl.float32)
    of_k = tl.zeros([BLOCK_WIDTH], tl.float32)
    of_v = tl.zeros([BLOCK_VALUES], tl.float32)
    end = tl.load(Bounds + key + 1)
    for first in range(tl.load(Bounds + key), end, BLOCK_QUERIES):
        place = first + tl.arange(0, BLOCK_QUERIES)
        inside = place < end
        query = tl.load(Queries + place, mask=inside, other=0)
        for member in range(GROUP):
            head = key_head * GROUP + member
            q = rows_of(Q + head * q_head, query, q_token, 0, 0, feature, WIDTH, inside).to(tl.float32)
            grad = rows_of(Grad + head * grad_head, query, grad_token, 0, 0, value_feature, VALUES, inside)
            grad = grad.to(tl.float32)
            lse = tl.load(Lse + head * tokens + query, mask=inside, other=0.0)
            delta = tl.load(Delta + head * tokens + query, mask=inside, other=0.0)
            score = tl.sum(q * k[None, :], 1) * scale
            weight = tl.where(inside, tl.exp(score - lse), 0.0)
            of_score = weight * (tl.sum(grad * v[None, :], 1) - delta) * scale
            of_v += tl.sum(weight[:, None] * grad, 0)
            of_k += tl.sum(of_score[:, None] * q, 0)
    at = OfK + key_head * of_k_head + key * of_k_token + feature
    tl.store(at, of_k.to(OfK.dtype.element_ty), mask=feature < WIDTH)
    at = OfV + key_head * of_v_head + key * of_v_token + value_feature
    tl.store(at, of_v.to(OfV.dtype.element_ty), mask=value_feature < VALUES)
