"""``torch.library.opcheck`` on the operators that passes put into graphs: fakes against results, in any layout."""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention

import treefx.backend  # noqa: F401  (registers the operators)
from tests import libraries
from tests.backend.calls.test_heads import Scores
from treefx.passes.cuts.exchange import exchange, exchange_backward
from treefx.passes.cuts.exchange_heads import heads_to_tokens, tokens_to_heads
from treefx.passes.packing.vocab_tail import surprise
from treefx.passes.trace import flash, heads, library_calls, opaque_ops, token_modules

_ops: Any = torch.ops.treefx

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "one row for all": lambda x: x[:1].expand_as(x),
}
ROW, TARGET = torch.tensor([0, 1, 1, -1, 3, 2]), torch.tensor([5, 0, 2, 1, -1, 2])
TOKENS = torch.tensor([[0, 1, 2, -1], [0, 1, 3, -1]])


@pytest.fixture(params=LAYOUTS)
def lay(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    return LAYOUTS[request.param]


def each_with(name: str, *values: Any) -> pytest.MarkDecorator:
    """Every layout with one of the values in turn: which it is changes no layout."""
    names = zip(LAYOUTS, itertools.cycle(values), strict=False)
    return pytest.mark.parametrize(("lay", name), names, indirect=["lay"])


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@each_with("dtype", torch.float32, torch.bfloat16)
def test_expand_and_restore(lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for shape, token_of in (((4, 6), TOKENS), ((4,), TOKENS.t()), ((4, 2, 3), TOKENS[:1].expand(3, 4))):
        x = lay(torch.randn(shape).to(dtype))
        opcheck(_ops.expand.default, (leaf(x), token_of))
        opcheck(_ops.restore.default, (lay(torch.randn(*token_of.shape, *shape[1:]).to(dtype)), token_of, x))


@each_with("dtype", torch.float32, torch.bfloat16)
def test_own_products(lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    q, k, grad = (lay(torch.randn(shape).to(dtype)) for shape in ((4, 2, 3), (5, 3), (4, 2, 6)))
    own = lay(torch.randint(0, 5, (4, 6)))
    opcheck(_ops.own_products.default, (leaf(q), leaf(k), own))
    opcheck(_ops.own_products_backward.default, (grad, q, k, own))


@each_with("sinks", False, True)
def test_sparse_tree_attention(lay: Callable[[Tensor], Tensor], sinks: bool) -> None:
    q, k, v = (lay(torch.randn(shape)) for shape in ((4, 5, 3), (2, 5, 3), (2, 5, 6)))
    keys = lay(torch.tensor([[0, -1], [1, 0], [2, -1], [3, 1], [-1, -1]], dtype=torch.int32))
    logits = torch.randn(4) if sinks else None
    operands = leaf(q), leaf(k), leaf(v), keys, None if logits is None else leaf(logits)
    for impl in ("chunks", "reference"):
        opcheck(_ops.sparse_tree_attention.default, (*operands, 0.5, impl))
    out, lse = _ops.sparse_tree_attention(q, k, v, keys, logits, 0.5, "chunks")
    grad = lay(torch.randn(4, 5, 6))
    opcheck(_ops.sparse_tree_attention_backward.default, (grad, q, k, v, keys, logits, out, lse, 0.5, "chunks"))


def test_as_read(lay: Callable[[Tensor], Tensor]) -> None:
    for x in (leaf(lay(torch.randn(4, 6))), lay(torch.randn(4, 6)).long(), torch.zeros((), dtype=torch.float64)):
        opcheck(_ops.as_read.default, (x,))


@each_with("dtype", torch.float32, torch.float64)
def test_pick_and_restore_pick(lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = lay(torch.randn(4, 6, dtype=dtype))
    opcheck(_ops.pick.default, (leaf(x), ROW, TARGET))
    opcheck(_ops.entries.default, (lay(TARGET.masked_fill(TARGET < 0, -100)), 6, -100))
    opcheck(_ops.restore_pick.default, (torch.ones((), dtype=dtype).expand(6), ROW, TARGET, x))


@each_with("biased", False, True)
def test_surprise_and_its_gradients(lay: Callable[[Tensor], Tensor], biased: bool) -> None:
    """A weight that is transposed in memory had a gradient in its own layout, where the fake promised a dense one."""
    hidden, weight = lay(torch.randn(4, 3)), lay(torch.randn(9, 3))
    bias = lay(torch.randn(9, 1))[:, 0] if biased else None
    numbers = (ROW, TARGET, 1.3, 2.0, 4)
    opcheck(_ops.surprise.default, (leaf(hidden), weight, None if bias is None else leaf(bias), *numbers))
    loss, lse = surprise(hidden, weight, bias, *numbers)
    for wanted in ([True, True, biased], [False, True, False]):
        grad = torch.ones(()).expand(6)
        opcheck(
            _ops.restore_surprise.default,
            (grad, hidden, weight, bias, ROW, TARGET, loss, lse, 1.3, 2.0, 4, wanted),
        )


def test_no_token_at_all() -> None:
    """Every row is padding: nothing is read, all gradients are zero."""
    none = torch.full((4,), -1)
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    opcheck(_ops.surprise.default, (hidden, weight, None, none, none, 1.0, None, 0))
    opcheck(_ops.expand.default, (hidden, none))
    opcheck(_ops.pick.default, (hidden, none, none))
    loss, _ = surprise(hidden, weight, None, none, none, 1.0, None, 0)
    of_hidden, of_weight = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert not loss.any() and of_hidden.shape == (0, 3) and not of_weight.any()


def test_attention(lay: Callable[[Tensor], Tensor]) -> None:
    """torch's own attention returns the layout of its queries."""
    q = lay(torch.randn(2, 4, 5, 8))
    inside = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query, key, value, gqa in (
        (q, q, q, False),
        (inside, inside, inside, False),
        (inside, q[:, :2], q[:, :2], True),
    ):
        opcheck(_ops.attention.default, (query, key, value, None, 0.0, True, None, gqa))
    opcheck(_ops.attention.default, (inside, q, q[..., :6], torch.randn(5, 5), 0.0, False, 0.3, False))


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, s_aux: Tensor | None = None, **more: Any) -> Tensor:
    """Stands for transformers' function, [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=more["is_causal"], enable_gqa=True)
    return out.transpose(1, 2) * (1 if s_aux is None else s_aux[None, None, :, None])


def test_flash(lay: Callable[[Tensor], Tensor]) -> None:
    flash.register_kernel("plain", _plain)
    q, sinks, ends = lay(torch.randn(2, 4, 5, 8)), torch.randn(4), torch.tensor([0, 3, 10], dtype=torch.int32)
    settings = (True, 0.3, 4, None, None, "plain")
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    for operands in ((mask, None, None, None, None), (None, torch.arange(5)[None], ends, ends, sinks)):
        opcheck(_ops.flash.default, (leaf(q), leaf(q[:, :2]), leaf(q[:, 2:]), *operands, None, *settings))
        grad = torch.ones(()).expand(2, 4, 5, 8)
        opcheck(_ops.flash_backward.default, (grad, q, q[:, :2], q[:, 2:], *operands, None, *settings))


@each_with("with_bias", False, True)
def test_head(lay: Callable[[Tensor], Tensor], with_bias: bool) -> None:
    key = heads.register_head(heads.Head(Scores, (0.5,)))
    target = torch.where(TARGET < 0, heads.UNSCORED, TARGET)
    hidden, weight = lay(torch.randn(4, 6).double()), lay(torch.randn(7, 6).double())
    bias = torch.randn(7).double() if with_bias else None
    opcheck(_ops.head.default, (leaf(hidden), target, leaf(weight), None if bias is None else leaf(bias), ROW, key))
    grads = [torch.ones(()).expand(6).double(), torch.randn(6).double(), None, None]
    for wanted in ([True, True, with_bias], [False, True, False]):
        opcheck(_ops.head_backward.default, (grads, hidden, target, weight, bias, ROW, key, wanted))


def test_segments() -> None:
    positions, ends = torch.tensor([[0, 1, 2, 0, 0, 1]]), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    for given in ((positions, None), (None, ends), (positions, ends[::2])):
        opcheck(_ops.segments.default, (*given, 6))
    by_positions, by_ends = flash.segments(positions, None, 6), flash.segments(None, ends, 6)
    assert torch.equal(by_positions, by_ends + 1) and by_ends.tolist() == [[0, 0, 0, 1, 2, 2]]


class Forward(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Any:
        return [x * w, (x + 1).t()]


class OneGradient(nn.Module):
    def forward(self, g: Tensor, h: Tensor, x: Tensor, w: Tensor) -> Any:
        return [g * w + h.t()]


class TransposedAndTooLarge(nn.Module):
    def forward(self, g: Tensor, h: Tensor, x: Tensor, w: Tensor) -> Any:
        return [(g * w).t().contiguous().t(), (g * x).double()]


GRADIENTS = {OneGradient: (True, False), TransposedAndTooLarge: (True, True)}


@each_with("shape", (3, 4), (4,), (4,), (3, 4))
@pytest.mark.parametrize("backward", GRADIENTS)
def test_custom_function(lay: Callable[[Tensor], Tensor], backward: type[nn.Module], shape: tuple[int, ...]) -> None:
    """A user's gradient in another layout, dtype or shape than its input, which autograd sums and casts to it."""
    bodies = fx.symbolic_trace(Forward()), fx.symbolic_trace(backward())
    saved = (("input", 0), ("input", 1))
    key = opaque_ops.register_function(opaque_ops.Function(*bodies, 2, saved, GRADIENTS[backward]))
    x, w = lay(torch.randn(3, 4)), torch.randn(shape)
    opcheck(_ops.custom_function.default, ([leaf(x), leaf(w)], key))
    grads = [torch.ones(()).expand(3, 4), torch.randn(4, 3)]
    opcheck(_ops.custom_function_backward.default, (grads, [x, w], key))


@pytest.fixture
def alone() -> Iterator[str]:
    """The name of a group of this process, which sends to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    yield group.group_name
    dist.destroy_process_group()


@each_with("dtype", torch.float32, torch.bfloat16)
def test_exchange(lay: Callable[[Tensor], Tensor], dtype: torch.dtype, alone: str) -> None:
    """Tokens 3 and 1 are sent and come in the other order; the boundary is filled up with a row of zeros."""
    k, v = lay(torch.randn(1, 2, 5, 4).to(dtype)), lay(torch.randn(1, 3, 5, 2).to(dtype))
    sent, order, counts = torch.tensor([3, 1, 0]), torch.tensor([1, 0, 2]), torch.tensor([[2], [2]])
    opcheck(_ops.exchange.default, ([leaf(k), leaf(v)], sent, order, counts, alone))
    for x, came in zip((k, v), exchange([k, v], sent, order, counts, alone), strict=True):
        assert torch.equal(came[0, :2], x[0, :, [1, 3]].transpose(0, 1)) and not came[0, 2].any()
    grads = [lay(torch.randn(1, 3, 2, 4).to(dtype)), torch.ones((), dtype=dtype).expand(1, 3, 3, 2)]
    opcheck(_ops.exchange_backward.default, (grads, sent, order, counts, 5, alone))
    for grad, back in zip(grads, exchange_backward(grads, sent, order, counts, 5, alone), strict=True):
        assert torch.equal(back[0, :, [1, 3]].transpose(0, 1), grad[0, :2]) and not back[0, :, [0, 2, 4]].any()


@each_with("dtype", torch.float32, torch.bfloat16)
def test_exchange_of_heads(lay: Callable[[Tensor], Tensor], dtype: torch.dtype, alone: str) -> None:
    """Three of five tokens are held, in another order than the forest's, which is filled up with zeros."""
    k, g = lay(torch.randn(5, 2, 4).to(dtype)), lay(torch.randn(5, 4))
    place, counts = torch.tensor([1, 2, 0, 3]), torch.tensor([3])
    opcheck(_ops.tokens_to_heads.default, ([leaf(k), leaf(g)], place, counts, 4, alone))
    for x, came in zip((k, g), tokens_to_heads([k, g], place, counts, 4, alone), strict=True):
        assert torch.equal(came[:3], x[[1, 2, 0]]) and not came[3].any()
    k, g = lay(torch.randn(4, 2, 4).to(dtype)), lay(torch.randn(4, 4))
    for copies in (True, False):
        given = ([2, 4], 5, place, counts, 4, alone, copies)
        opcheck(_ops.heads_to_tokens.default, ([leaf(k), leaf(g)], *given))
        for x, came in zip((k, g), heads_to_tokens([k, g], *given), strict=True):
            assert torch.equal(came[:3], x[[2, 0, 1]])
            assert torch.equal(came[3:], (x[2] if copies else torch.zeros_like(x[2])).expand_as(came[3:]))


@each_with("dtype", torch.float32, torch.bfloat16)
def test_over_ranks(lay: Callable[[Tensor], Tensor], dtype: torch.dtype, alone: str) -> None:
    x = lay(torch.randn(4, 6).to(dtype))
    for op in (_ops.sum_over_ranks.default, _ops.same_on_ranks.default):
        opcheck(op, (leaf(x), alone))
        assert torch.equal(op(x, alone), x)
    for op in (_ops.gather_pieces.default, _ops.own_piece.default):
        for dim in (0, 1):
            opcheck(op, (leaf(x), dim, 1, alone))
            assert torch.equal(op(x, dim, 1, alone), x)


SEQUENCES = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 1, 1, 1]])


@each_with("delta", True, False)
def test_row_scan(lay: Callable[[Tensor], Tensor], delta: bool) -> None:
    q, k, v = (lay(torch.randn(2, 5, heads, 3, dtype=torch.float64)) for heads in (1, 1, 2))
    g, step = (lay(torch.rand(2, 5, 2, dtype=torch.float64)) for _ in range(2))
    given = (*map(leaf, (q, k, v, -g)), leaf(step) if delta else None)
    grad = lay(torch.randn(2, 5, 2, 3, dtype=torch.float64))
    for segments in (None, SEQUENCES):
        opcheck(_ops.row_scan.default, (*given, segments))
        opcheck(_ops.row_scan_backward.default, (grad, q, k, v, -g, step if delta else None, segments))


@each_with("biased", True, False)
def test_row_convolution(lay: Callable[[Tensor], Tensor], biased: bool) -> None:
    x, weight = (lay(torch.randn(shape, dtype=torch.float64)) for shape in ((2, 4, 5), (4, 1, 3)))
    bias = torch.randn(4, dtype=torch.float64) if biased else None
    opcheck(_ops.row_convolution.default, (leaf(x), leaf(weight), None if bias is None else leaf(bias), SEQUENCES))
    grad = lay(torch.randn(2, 4, 5, dtype=torch.float64))
    opcheck(_ops.row_convolution_backward.default, (grad, x, weight, bias, SEQUENCES))


def test_library(lay: Callable[[Tensor], Tensor]) -> None:
    def twice(hidden_states: Tensor, weight: Tensor, activation: str) -> Tensor:
        return 2 * hidden_states * weight[:, :1]

    given = (library_calls.Given(0), library_calls.Given(1))
    call = library_calls.LibraryCall("causal_conv1d_fn", twice, "tests.twice", twice, given, (("activation", "silu"),))
    held = library_calls.register_call(call)
    tensors = [lay(torch.randn(2, 4, 6)), lay(torch.randn(4, 3))]
    opcheck(_ops.library.default, ([leaf(x) for x in tensors], held.key, None))
    opcheck(_ops.library_backward.default, (lay(torch.randn(2, 4, 6)), tensors, held.key))


def test_token_module(lay: Callable[[Tensor], Tensor]) -> None:
    """Two results, one of them in line; a frozen weight gets no gradient."""

    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x[..., :2].flatten(0, -2)

    module = Both(3, 4)
    forms = tuple(
        token_modules.ModuleResult(in_line, (width,), torch.float32) for in_line, width in ((False, 4), (True, 2))
    )
    held = token_modules.TokenModule(weakref.ref(module), ("weight", "bias"), forms, False, None, 24.0)
    token_modules.register_module("tests.both", held)
    tensors = [lay(torch.randn(2, 5, 3)), lay(torch.randn(4, 3)), torch.randn(4)]
    opcheck(_ops.token_module.default, ([leaf(tensors[0]), tensors[1], leaf(tensors[2])], "tests.both"))
    grads = [lay(torch.randn(2, 5, 4)), torch.randn(10, 2)]
    opcheck(_ops.token_module_backward.default, (grads, tensors, [True, False, True], "tests.both"))


def test_library_tree(lay: Callable[[Tensor], Tensor]) -> None:
    def body(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> None: ...

    given = tuple(library_calls.Given(number) for number in range(5))
    takes = frozenset(inspect.signature(libraries.chunk_kda).parameters)
    call = library_calls.LibraryCall("chunk_kda", libraries.chunk_kda, "tests.kda", body, given, (), takes)
    held = library_calls.register_call(call)
    tensors = [lay(torch.rand(1, 5, 2, 3, dtype=torch.float64)) for _ in range(3)]
    tensors += [lay(-torch.rand(1, 5, 2, 3, dtype=torch.float64)), lay(torch.rand(1, 5, 2, dtype=torch.float64))]
    ends = torch.tensor([5, 5, 4, 4, 5], dtype=torch.int32)
    opcheck(_ops.library_tree.default, ([leaf(x) for x in tensors], ends, held.key))
    grad = lay(torch.randn(1, 5, 2, 3, dtype=torch.float64))
    opcheck(_ops.library_tree_backward.default, (grad, tensors, ends, held.key))
    doors = (torch.rand(2, 2, 3, 3, dtype=torch.float64), torch.tensor([1, 2, 2, 2, 0]), torch.tensor([0, 3, -1]))
    ends = torch.tensor([4, 4, 4, 4, 5], dtype=torch.int32)
    opcheck(_ops.library_part.default, ([leaf(x) for x in tensors], ends, held.key, leaf(doors[0]), *doors[1:]))
    left = lay(torch.randn(3, 2, 3, 3, dtype=torch.float64))
    opcheck(_ops.library_part_backward.default, (grad, left, tensors, ends, held.key, *doors))


def test_every_operator_has_its_check() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("treefx::")]
    assert {name.removeprefix("treefx::").split(".")[0] for name in names} == {
        "as_read", "attention", "custom_function", "custom_function_backward", "entries", "exchange",
        "exchange_backward", "expand", "flash", "flash_backward", "gather_pieces", "head", "head_backward",
        "heads_to_tokens", "library", "library_backward", "library_part", "library_part_backward", "library_tree",
        "library_tree_backward", "own_piece", "own_products", "own_products_backward", "part_scan",
        "part_scan_backward", "pick", "restore", "restore_pick", "restore_surprise", "row_convolution",
        "row_convolution_backward", "row_scan", "row_scan_backward", "same_on_ranks", "segments",
        "sparse_tree_attention", "sparse_tree_attention_backward", "sum_over_ranks", "surprise", "token_module",
        "token_module_backward", "tokens_to_heads", "tower", "tree_attention", "tree_attention_backward", "tree_scan",
        "tree_scan_backward",
    }  # fmt: skip
