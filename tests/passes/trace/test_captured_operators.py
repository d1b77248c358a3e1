"""Which operators a CUDA graph may hold: those that run without a look at values, and no others.

A CUDA graph replays launches. An operator that waits for the device fails while one is recorded; one that allocates or
decides by values replays the decisions of another batch. Tensors of the "meta" device have no values: what looks at
them raises, and every branch for other devices than the CPU is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels import expand
from treefx.kernels import ops as _attention  # noqa: F401  (registers operators)
from treefx.kernels import own_products as own
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.head_loss import eager
from treefx.kernels.recurrence import part_scan as _scans  # noqa: F401
from treefx.kernels.recurrence import row_scan
from treefx.kernels.sparse import ops as sparse
from treefx.passes.cuts import exchange as _exchange  # noqa: F401
from treefx.passes.cuts import exchange_heads as _exchange_heads  # noqa: F401
from treefx.passes.packing import vocab_tail
from treefx.passes.ranks import collectives
from treefx.passes.trace import changed_inputs, flash, heads, opaque_ops
from treefx.passes.trace import library_part as _library_part  # noqa: F401
from treefx.passes.trace import library_tree as _library_tree  # noqa: F401

TAGGED = {
    "custom_function", "custom_function_backward", "exchange", "exchange_backward", "flash", "flash_backward",
    "gather_pieces", "head", "head_backward", "heads_to_tokens", "library", "library_backward", "library_part",
    "library_part_backward", "library_tree", "library_tree_backward", "part_scan", "part_scan_backward", "row_scan",
    "row_scan_backward", "sum_over_ranks", "token_module", "token_module_backward", "tokens_to_heads", "tower",
    "tree_attention", "tree_attention_backward", "tree_scan", "tree_scan_backward",
}  # fmt: skip
OF_A_GROUP = {"own_piece"}
"""Needs a process group, and then reads a slice of a fixed size."""


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def numbers(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.int64)


N, V, H, R = 6, 11, 4, 8
HIDDEN, WEIGHT, BIAS = floats(N, H), floats(V, H), floats(V)
TAIL = (HIDDEN, WEIGHT, BIAS, numbers(R), numbers(R))
HEADS = (floats(1, 2, N, H), floats(1, 1, N, H), floats(1, 1, N, H))
LISTED = (*(x[0] for x in HEADS), numbers(N, 3))
UNTAGGED: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "as_read": (changed_inputs.as_read, [(HIDDEN,)]),
    "attention": (opaque_ops.attention, [(*HEADS, None, 0.0, True, None, True)]),
    "entries": (expand.entries, [(numbers(R), V, -100), (numbers(R), V, None)]),
    "expand": (expand.expand, [(HIDDEN, numbers(2, 4)), (floats(0, H), numbers(2, 4))]),
    "own_products": (own.own_products, [(floats(N, 2, H), floats(N, H), numbers(N, R))]),
    "own_products_backward": (
        own.own_products_backward, [(floats(N, 2, R), floats(N, 2, H), floats(N, H), numbers(N, R))],
    ),
    "pick": (expand.pick, [(floats(N, V), numbers(R), numbers(R))]),
    "restore": (expand.restore, [(floats(2, 4, H), numbers(2, 4), HIDDEN)]),
    "restore_pick": (expand.restore_pick, [(floats(R), numbers(R), numbers(R), floats(N, V))]),
    "restore_surprise": (
        vocab_tail.restore_surprise, [(floats(R), *TAIL, floats(R), floats(N), 0.5, 30.0, 3, [True, True, True])],
    ),
    "row_convolution": (row_scan.row_convolution, [(floats(1, H, N), floats(H, 1, 3), None, numbers(1, N))]),
    "row_convolution_backward": (
        row_scan.row_convolution_backward, [(floats(1, H, N), floats(1, H, N), floats(H, 1, 3), None, numbers(1, N))],
    ),
    "same_on_ranks": (collectives.same_on_ranks, [(HIDDEN, "group")]),
    "segments": (flash.segments, [(numbers(1, N), None, N), (None, numbers(3), N)]),
    "sparse_tree_attention": (sparse.sparse_tree_attention, [(*LISTED, None, 0.5), (*LISTED, floats(2), 0.5)]),
    "sparse_tree_attention_backward": (
        sparse.sparse_tree_attention_backward,
        [(HEADS[0][0], *LISTED, sinks, HEADS[0][0], floats(2, N), 0.5, "auto") for sinks in (None, floats(2))],
    ),
    "surprise": (vocab_tail.surprise, [(*TAIL, 0.5, 30.0, 3), (*TAIL, 1.0, None, 0)]),
}  # fmt: skip


def names() -> set[str]:
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("treefx::")}  # fmt: skip
    return {name for name in registered if not name.startswith("test_")}


def is_tagged(name: str) -> bool:
    return set(NOT_CAPTURED) <= set(getattr(torch.ops.treefx, name).default.tags)


def test_every_operator_is_tagged_or_needs_no_tag() -> None:
    assert NOT_CAPTURED == (torch.Tag.cudagraph_unsafe,)
    assert {name for name in names() if is_tagged(name)} == TAGGED
    assert names() == TAGGED | OF_A_GROUP | UNTAGGED.keys()


@pytest.mark.parametrize("name", UNTAGGED)
def test_operators_without_the_tag_look_at_no_values(name: str) -> None:
    operator, calls = UNTAGGED[name]
    for call in calls:
        operator._init_fn(*call)


def planted(x: Tensor, missing: Tensor) -> Tensor:
    """What ``expand`` did on every device: it looked whether anything is missing."""
    result = x.clone()
    if bool(missing.any()):
        result[missing] = 0
    return result


@pytest.mark.parametrize(
    ("run", "call"),
    [
        (planted, (HIDDEN, numbers(N) < 0)),
        (heads._pairs, (numbers(R), numbers(R))),
        (lambda ends: flash._longest(ends), (numbers(3),)),
        (eager._picked_chunks, ([slice(0, 3), slice(3, V)], numbers(R), numbers(R))),
    ],
    ids=["expand as it was", "head", "flash", "the loss as on the CPU"],
)
def test_a_look_at_values_is_seen(run: Callable[..., Any], call: Sequence[Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        found = run(*call)
        list(found)


def test_a_pytorch_without_the_tag_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from treefx.kernels import cuda_graphs

    with monkeypatch.context() as patched:
        patched.setattr(torch, "Tag", SimpleNamespace())
        assert importlib.reload(cuda_graphs).NOT_CAPTURED == ()
    assert importlib.reload(cuda_graphs).NOT_CAPTURED == (torch.Tag.cudagraph_unsafe,)
