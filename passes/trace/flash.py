"""Keep transformers' flash attention whole: one operator of all its arguments.

``treefx::flash`` stands for that function, with any kernel; where the graph runs on rows, it calls it. The function's
branches on numbers, one after the other, are:

==============================  ============================================================================
a mask with padding             the kept tokens of each row see each other; zeros at the others
``cu_seq_lens``                 one row, cut where they say (``treefx::segments``)
positions that do not count up  one row, cut where they are lowest (``treefx::segments``)
nothing of these                whole rows
==============================  ============================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from treefx.kernels.common import owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.passes.trace.library_calls import call_of, is_library_call

__all__ = [
    "FlashCall", "autograd_recorded", "call_flash", "ends_of_segments", "flash", "has_flash", "is_flash",
    "number_segments", "read_equal_once", "register_kernel", "segments",
]  # fmt: skip

Kernel = Callable[..., Tensor]
_KERNELS: dict[str, Kernel] = {}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Keep the function of transformers that operators call by the name of an implementation."""
    _KERNELS[name] = kernel


class FlashCall(NamedTuple):
    """Hold the arguments of ``treefx::flash``, as in transformers but heads first.

    Shapes: query [B, H, T, D], key and value [B, Hkv, T, D], mask bool [B, T], positions int [1, T], ends of segments
    int [S + 1] from 0 to T, sinks [H]; ``segments`` [1, T] is for proofs alone. None where there is none.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    positions: Any
    query_ends: Any
    key_ends: Any
    sinks: Any
    segments: Any
    is_causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    deterministic: bool | None
    kernel: str


_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? positions, Tensor? query_ends, Tensor? key_ends, "
    "Tensor? sinks, Tensor? segments, bool is_causal, float? scale, SymInt? window, float? softcap, "
    "bool? deterministic, str kernel"
)


@torch.library.custom_op("treefx::flash", mutates_args=(), schema=f"({_CALL}) -> Tensor", tags=NOT_CAPTURED)
def flash(*call: Any) -> Tensor:
    """The result of a ``FlashCall``, [B, H, T, Dv]."""
    return _tokens_first(_run(FlashCall(*call)).transpose(1, 2))


@flash.register_fake
def _(*call: Any) -> Tensor:
    return _empty(call[0], call[2].shape[-1])


@torch.library.custom_op(
    "treefx::flash_backward", mutates_args=(), tags=NOT_CAPTURED,
    schema=f"(Tensor grad, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def flash_backward(grad: Tensor, *of: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and sinks of a ``FlashCall``.

    Sinks are empty where there are none.

    The forward runs once more, under autograd: only the kernel knows its saved values.
    """
    given = FlashCall(*of)
    learned = [name for name in ("query", "key", "value", "sinks") if getattr(given, name) is not None]
    with autograd_recorded():
        leaves = {name: getattr(given, name).detach().requires_grad_() for name in learned}
        call = given._replace(**leaves)
        found = torch.autograd.grad(_run(call).transpose(1, 2), list(leaves.values()), grad)
    of_sinks = found[3].contiguous() if given.sinks is not None else given.query.new_empty(0)
    return (*(_tokens_first(of) for of in found[:3]), of_sinks)


@flash_backward.register_fake
def _(grad: Tensor, *of: Any) -> tuple[Tensor, ...]:
    call = FlashCall(*of)
    of_sinks = call.query.new_empty(0) if call.sinks is None else call.sinks.new_empty(call.sinks.shape)
    return (*(_empty(x, x.shape[-1]) for x in call[:3]), of_sinks)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = FlashCall(*inputs)
    ctx.save_for_backward(*call[:8])
    ctx.settings = call[9:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint hands them out no second time
    query, key, value, sinks = flash_backward(grad, *saved, None, *ctx.settings)
    of_sinks = None if saved[7] is None else sinks
    return (query, key, value, None, None, None, None, of_sinks, *[None] * 7)


flash.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("treefx::segments", mutates_args=())
def segments(positions: Tensor | None, ends: Tensor | None, columns: int) -> Tensor:
    """Number the segments of one row, int64 [1, columns].

    Cuts are at ``ends``, or where positions are lowest.
    """
    if ends is not None:
        column = torch.arange(columns, device=ends.device, dtype=ends.dtype)
        return torch.searchsorted(ends[1:].contiguous(), column, right=True)[None]
    assert positions is not None
    return (positions == positions.min()).cumsum(1)


@segments.register_fake
def _(positions: Tensor | None, ends: Tensor | None, columns: int) -> Tensor:
    given = positions if ends is None else ends
    assert given is not None
    return given.new_empty((1, columns), dtype=torch.int64)


_FLASH: set[Any] = {torch.ops.treefx.flash, torch.ops.treefx.flash.default, flash}


def is_flash(target: Any) -> bool:
    """Whether a target of a graph is ``treefx::flash``."""
    return target in _FLASH


def has_flash(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo, or a body inside of it, calls ``treefx::flash``."""
    return _calls(gm, is_flash)


def _calls(gm: fx.GraphModule, is_one: Callable[[Any], bool]) -> bool:
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(is_one(node.target) for body in bodies for node in body.graph.nodes)


_OF_LENGTHS = {torch.cumsum, torch._C._nn.pad, torch.cat, "cumsum", "to", "int", "long"}
"""Functions from lengths to ends."""


def ends_of_segments(gm: fx.GraphModule) -> set[fx.Node]:
    """The inputs of a graph of Dynamo that say where segments end, and nothing else.

    Either ends themselves, or one input of lengths, of which the graph makes the ends.
    """
    placeholders = gm.graph.find_nodes(op="placeholder") if _calls(gm, is_flash) or _calls(gm, is_library_call) else []
    given = [(node, node.meta.get("example_value")) for node in placeholders]
    lists = [node for node, x in given if isinstance(x, Tensor) and x.dim() == 1]
    ends = {node for node in lists if _says_ends(node)}
    lengths = {node for node in lists if node not in ends and _says_lengths(node)}
    return ends or (lengths if len(lengths) == 1 else set())


def _says_ends(node: fx.Node) -> bool:
    found = list(_readers(node))
    return bool(found) and all(_reads_ends(reader, value) for value, reader in found)


def _reads_ends(reader: fx.Node, value: fx.Node) -> bool:
    if is_library_call(reader.target):
        return call_of(str(reader.args[1])).separator("cu_seqlens", reader.args[0]) is value
    return is_flash(reader.target) and value in reader.args[5:7]


def _says_lengths(node: fx.Node) -> bool:
    found = [reader for _, reader in _readers(node)]
    return bool(found) and all(
        reader.target in _OF_LENGTHS and (_says_ends(reader) or _says_lengths(reader)) for reader in found
    )


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield readers of a value, and its name there: a checkpoint's body renames it."""
    for user in node.users:
        if user.target is torch.ops.higher_order.tag_activation_checkpoint:
            body: Any = user.args[0]
            inside = getattr(user.graph.owning_module, body.target).graph.find_nodes(op="placeholder")
            for own, value in zip(inside, user.args[1:], strict=True):
                if value is node:
                    yield from _readers(own)
        elif user.target is not getattr:  # is_xpu, of pad
            yield node, user


def call_flash(call: FlashCall, known: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Write a call with its segments, and with the function's zeros at padding.

    Args:
        call: In a graph of Dynamo.
        known: By the values that tell segments, these and the segments; the layers of a model share them.
    """
    if call.query_ends is not None or call.positions is not None:
        positions = call.positions if call.query_ends is None else None
        call = call._replace(segments=number_segments(known, positions, call.query_ends, call.query.shape[2]))
    out: Tensor = flash(*call)
    return out if call.mask is None else out * call.mask.to(out.dtype)[:, None, :, None]


def number_segments(
    known: dict[int, tuple[Tensor, Tensor]], positions: Tensor | None, ends: Tensor | None, columns: int
) -> Tensor:
    """``treefx::segments``, once for all calls of a graph with the same positions or ends.

    Args:
        known: by the values that tell segments, these and the segments; the layers of a model share them.
        positions: of tokens; None where there are ends.
        ends: of segments.
        columns: of the row.
    """
    tells: Any = positions if ends is None else ends
    if id(tells) not in known:
        known[id(tells)] = tells, segments(positions, ends, columns)
    return known[id(tells)][1]


def read_equal_once(gm: fx.GraphModule, equal: Sequence[tuple[int, int]]) -> None:
    """Read one of two equal inputs in flash attention; inputs are positions of pairs."""
    given = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.treefx.flash.default):
        for later, earlier in equal:
            node.replace_input_with(given[later], given[earlier])


def _run(call: FlashCall) -> Tensor:
    """Call the function of transformers, [B, T, H, Dv]."""
    query, key, value = (x.transpose(1, 2) for x in call[:3])
    mask = None if call.mask is None or _remembered(_is_full, call.mask) else call.mask
    longest = None if call.query_ends is None else _remembered(_longest, call.query_ends)
    sinks = {} if call.sinks is None else {"s_aux": call.sinks}
    return _KERNELS[call.kernel](
        query, key, value, mask, query_length=query.shape[1], is_causal=call.is_causal, position_ids=call.positions,
        softmax_scale=call.scale, sliding_window=call.window, softcap=call.softcap, deterministic=call.deterministic,
        cu_seq_lens_q=call.query_ends, cu_seq_lens_k=call.key_ends, max_length_q=longest, max_length_k=longest,
        attn_implementation=call.kernel, **sinks,
    )  # fmt: skip


def _is_full(mask: Tensor) -> bool:
    return bool(mask.all())


def _longest(ends: Tensor) -> int:
    return int(ends.diff().max())


_answers: dict[Callable[[Tensor], Any], tuple[weakref.ref[Tensor], int, Any]] = {}


def _remembered(question: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Cache an answer on a tensor that every layer reads, to synchronize once."""
    if x.is_inference():
        return question(x)
    known = _answers.get(question)
    if known is None or known[0]() is not x or known[1] != x._version:
        known = _answers[question] = (weakref.ref(x), x._version, question(x))
    return known[2]


@contextmanager
def autograd_recorded() -> Iterator[None]:
    """Let autograd record inside of an operator, which runs below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RECORDING:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


_KEYS = torch._C.DispatchKey
_RECORDING = (_KEYS.AutogradFunctionality, _KEYS.AutogradOther, _KEYS.ADInplaceOrView)


def _tokens_first(x: Tensor) -> Tensor:
    """[B, H, T, D] that lies in memory as [B, T, H, D]."""
    return owned(x.transpose(1, 2)).transpose(1, 2)


def _empty(query: Tensor, features: int) -> Tensor:
    """Return an empty result of ``treefx::flash`` for a query.

    [B, H, T, features] that lies in memory as [B, T, H, features].
    """
    rows, heads, columns, _ = query.shape
    return query.new_empty(rows, columns, heads, features).transpose(1, 2)
