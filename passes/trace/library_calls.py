"""Keep calls of recurrence libraries whole: one operator for all libraries.

transformers binds ``chunk_gated_delta_rule`` and ``chunk_kda`` of flash-linear-attention, ``causal_conv1d_fn`` of
causal-conv1d, ``mamba_chunk_scan_combined`` and ``selective_scan_fn`` of mamba_ssm to its models where these packages
are installed, and bodies of plain PyTorch elsewhere. ``treefx::library`` stands for a call of the library:

=====================  ==========================================================================================
a graph of rows        runs the library's function
a packed graph          takes the form of ``read_call``: a convolution or a recurrence (``treefx::row_scan``), which
                       take the tree parent as the token before
without such a form    runs the library's function on rows; a causal law proves that its result may be read once
                       per distinct token
=====================  ==========================================================================================

Each form equals transformers' own PyTorch body of the function, for any number of tokens. Where sequences are packed
into one row, the library starts over at each; so do ``treefx::row_scan`` and ``treefx::row_convolution``.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from treefx.kernels.common import autograd_enabled, owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.row_scan import row_convolution, row_scan

__all__ = [
    "KINDS", "PACKING", "Arguments", "Given", "Kind", "LibraryCall", "Scan", "call_of", "hold_calls", "is_library_call",
    "library", "read_call", "register_call", "steps_of", "unfused",
]  # fmt: skip


Arguments = Mapping[str, Any]
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A linear recurrence: ``treefx::row_scan``, or the same along a tree."""


@dataclass(frozen=True)
class Kind:
    """A function of a library.

    Attributes:
        result: an empty result of a call, by the arguments.
        read: the call in operators that passes know, a recurrence by a ``Scan``, a convolution of packed sequences by
            their numbers; None where there is no such form.
        tokens: the dimension of tokens in the result.
        tokens_of_operands: the same in all operands that have tokens.
        pair: whether the function returns its last state as well, or None in its place.
    """

    result: Callable[[Arguments], Tensor]
    read: Callable[[Arguments, Scan, Tensor | None], Tensor] | None
    tokens: int = 1
    tokens_of_operands: int = 1
    pair: bool = False


class Given(NamedTuple):
    """The number of a tensor among the operator's."""

    number: int


@dataclass(frozen=True)
class LibraryCall:
    """Hold one call of a library and its arguments.

    Attributes:
        name: of the function, a key of ``KINDS``.
        function: as the model calls it: transformers' wrapper, which drops unsupported arguments.
        library: module and name of the library's function.
        body: transformers' PyTorch form of it.
        positional: arguments by position: ``Given``, or a value.
        named: arguments by name, likewise.
        takes: the names of all arguments that the library's function has.
        packing: name and tensor of the argument that separates packed sequences (``PACKING``): the last tensor. The
            library alone gets it: its PyTorch body has none, and a tree needs none.
        inner: of a function that fuses a recurrence with other operators, the call of the recurrence alone.
    """

    name: str
    function: Callable[..., Any]
    library: str
    body: Callable[..., Any]
    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    takes: frozenset[str] = frozenset()
    packing: tuple[str, Given] | None = None
    inner: LibraryCall | None = None

    @property
    def kind(self) -> Kind:
        """Return the facts on the function."""
        return KINDS[self.name]

    @property
    def key(self) -> str:
        """Return the same key in every process for the same call of the same package."""
        return f"{self.library}{self.positional}{self.named}{self.packing} by {self.body.__module__}"

    def arguments(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The arguments by the names that the PyTorch body has for them."""
        args, kwargs = self.filled(tensors)
        return dict(inspect.signature(self.body).bind(*args, **kwargs).arguments)

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """Call the library."""
        args, kwargs = self.filled(tensors)
        if self.packing is not None:
            kwargs[self.packing[0]] = tensors[self.packing[1].number]
        found = self.function(*args, **kwargs)
        result: Tensor = found[0] if isinstance(found, tuple | list) else found
        return result

    def filled(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the model gives them: by position, and by name."""

        def value(item: Any) -> Any:
            return tensors[item.number] if isinstance(item, Given) else item

        return [value(item) for item in self.positional], {name: value(item) for name, item in self.named}

    def separator(self, name: str, tensors: Any) -> Any:
        """The one of the call's tensors that is given under a name of ``PACKING``; None where none is."""
        return tensors[self.packing[1].number] if self.packing is not None and self.packing[0] == name else None


_CALLS: weakref.WeakValueDictionary[str, LibraryCall] = weakref.WeakValueDictionary()
"""By key, as long as a graph of Dynamo holds the call."""
_NEWEST: deque[LibraryCall] = deque(maxlen=64)
"""Calls of graphs in Dynamo's trace, or with a compiled backward that may still run."""


def register_call(call: LibraryCall) -> LibraryCall:
    """Register a call for graphs under ``hold_calls``; return the registered one."""
    _NEWEST.append(_CALLS.setdefault(call.key, call))
    return _NEWEST[-1]


def hold_calls(gm: fx.GraphModule) -> None:
    """Keep the calls of a graph of Dynamo, and of bodies inside of it, as long as the graph."""
    for body in gm.modules():
        for node in body.graph.nodes if isinstance(body, fx.GraphModule) else ():
            if is_library_call(node.target):
                node.meta["treefx_library_call"] = _CALLS[node.args[1]]


@torch.library.custom_op("treefx::library", mutates_args=(), tags=NOT_CAPTURED)
def library(tensors: list[Tensor], key: str, segments: Tensor | None) -> Tensor:
    """The result of a ``LibraryCall`` on rows; ``segments`` [B, T] is for proofs alone."""
    return owned(_CALLS[key].run(tensors))


@library.register_fake
def _(tensors: list[Tensor], key: str, segments: Tensor | None) -> Tensor:
    call = _CALLS[key]
    return call.kind.result(call.arguments(tensors))


@torch.library.custom_op("treefx::library_backward", mutates_args=(), tags=NOT_CAPTURED)
def library_backward(grad: Tensor, tensors: list[Tensor], key: str) -> list[Tensor]:
    """Return gradients of all floating-point tensors in order; rerun the forward."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    learned = [x for x in leaves if x.requires_grad]
    with autograd_enabled():
        found = torch.autograd.grad(_CALLS[key].run(leaves), learned, grad, allow_unused=True)
    return [torch.zeros_like(x) if of is None else owned(of) for of, x in zip(found, learned, strict=True)]


@library_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], key: str) -> list[Tensor]:
    learned = [x for x in tensors if x.is_floating_point()]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.key = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    found = iter(torch.ops.treefx.library_backward(grad, tensors, ctx.key))
    return [next(found) if x.is_floating_point() else None for x in tensors], None, None


library.register_autograd(_backward, setup_context=_setup_context)

_TARGETS: set[Any] = {torch.ops.treefx.library, torch.ops.treefx.library.default, library}


def is_library_call(target: Any) -> bool:
    """Whether a target of a graph is ``treefx::library``."""
    return target in _TARGETS


def call_of(key: str) -> LibraryCall:
    """The call that an operator stands for."""
    return _CALLS[key]


def read_call(tensors: Sequence[Tensor], key: str, segments: Tensor | None = None) -> Tensor:
    """The result of a call as passes read it.

    Args:
        tensors: of the call.
        key: of the call.
        segments: numbers of packed sequences [B, T], where it has some.
    """
    call = _CALLS[key]
    if call.kind.read is None:
        result: Tensor = torch.ops.treefx.library(list(tensors), key, segments)
        return result
    return call.kind.read(call.arguments(tensors), partial(_scan, segments), segments)


def _scan(segments: Tensor | None, *given: Tensor | None) -> Tensor:
    return row_scan(*given, segments)  # type: ignore[no-any-return]


# Semantics of functions
# -------------------------------------------------------------------------------------------------


def _like(name: str) -> Callable[[Arguments], Tensor]:
    return lambda given: torch.empty_like(given[name], memory_format=torch.contiguous_format)


def _projected(given: Arguments) -> Tensor:
    """[B, T, out] of Mamba 1: xz [B, 2 C, T]."""
    xz: Tensor = given["xz"]
    return xz.new_empty(xz.shape[0], xz.shape[2], given["out_proj_weight"].shape[0])


def _fused(given: Arguments) -> Tensor:
    """[B, T, out] of Mamba 2: zxbcdt [B, T, ...]."""
    tokens: Tensor = given["zxbcdt"]
    weight = given.get("outproj_weight")
    width = given["A"].shape[0] * given["headdim"] if weight is None else weight.shape[0]
    return tokens.new_empty(*tokens.shape[:2], width)


def _convolution(given: Arguments, scan: Scan, segments: Tensor | None) -> Tensor:
    """``causal_conv1d_fn``: hidden_states [B, C, T], weight [C, K], bias [C] -> [B, C, T]."""
    return _convolved(given["hidden_states"], given["weight"], given.get("bias"), given.get("activation"), segments)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, segments: Tensor | None
) -> Tensor:
    channels, taps = weight.shape
    wide = x.to(weight.dtype)
    if segments is None:
        out = F.conv1d(wide, weight[:, None], bias, padding=taps - 1, groups=channels)[:, :, : x.shape[2]]
    else:
        out = row_convolution(wide, weight[:, None], bias, segments)
    return (F.silu(out) if activation in _SILU else out).to(x.dtype)


def _delta_rule(given: Arguments, scan: Scan, segments: Tensor | None = None) -> Tensor:
    """Compute ``chunk_gated_delta_rule``.

    query, key [B, T, G, D], value [B, T, H, E], g, beta [B, T, H] -> [B, T, H, E].
    """
    names = ("query", "key", "value", "g", "beta")
    dtype = torch.promote_types(torch.float32, given["query"].dtype)
    query, key, value, g, beta = (given[name].to(dtype) for name in names)
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    out = scan(query / math.sqrt(query.shape[-1]), key, value, g, beta)
    return out.to(given["value"].dtype)


def _state_space(given: Arguments, scan: Scan, segments: Tensor | None = None) -> Tensor:
    """Compute ``mamba_chunk_scan_combined``.

    x [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N] -> [B, T, H, P].
    """
    x: Tensor = given["hidden_states"]
    dtype = torch.promote_types(torch.float32, x.dtype)
    dt = steps_of(given).to(dtype)
    wide = x.to(dtype)
    out = scan(given["C"].to(dtype), given["B"].to(dtype), wide * dt[..., None], given["A"].to(dtype) * dt, None)
    if given.get("D") is not None:
        out = out + given["D"].to(dtype)[..., None] * wide
    return out.to(x.dtype)


def steps_of(given: Arguments) -> Tensor:
    """Return a state space recurrence's steps [B, T, H]: with bias, positive, in limits."""
    dt: Tensor = given["dt"]
    if given.get("dt_bias") is not None:
        dt = dt + given["dt_bias"].to(dt.dtype)
    if given.get("dt_softplus"):
        dt = F.softplus(dt)
    low, high = given.get("dt_limit") or (0.0, math.inf)
    return dt.clamp(low, high)


def _fused_state_space(given: Arguments, scan: Scan, segments: Tensor | None) -> Tensor:
    """``mamba_split_conv1d_scan_combined`` in operators."""
    return unfused(given, lambda of_scan: _state_space(of_scan, scan), segments)


def unfused(given: Arguments, state_space: Callable[[Arguments], Tensor], segments: Tensor | None = None) -> Tensor:
    """Compute ``mamba_split_conv1d_scan_combined`` of zxbcdt [B, T, ...].

    Convolution, scan, gated norm and projection.

    The last dimension of zxbcdt is the gate z, then x, B and C, which the convolution reads, then dt. Unlike
    the parts that transformers runs where the package is missing, nothing is set to zero at padding behind the
    convolution.
    """
    tokens: Any = given["zxbcdt"]
    groups, width = given.get("ngroups", 1), given["headdim"]
    heads = given["A"].shape[0]
    inner = heads * width
    mixed = given["conv1d_weight"].shape[0]
    z, xbc, dt = torch.split(tokens, [inner, mixed, heads], -1)
    activation = given.get("activation", "silu")
    xbc = _convolved(xbc.transpose(1, 2), given["conv1d_weight"], given["conv1d_bias"], activation, segments)
    xbc = xbc.transpose(1, 2)
    states = (mixed - inner) // 2
    x, b, c = torch.split(xbc, [inner, states, states], -1)
    of_scan = {name: given[name] for name in ("A", "D", "dt_bias", "dt_limit") if name in given}
    of_scan |= {"hidden_states": torch.unflatten(x, -1, (heads, width)), "dt": dt, "dt_softplus": True}
    of_scan |= {"B": torch.unflatten(b, -1, (groups, -1)), "C": torch.unflatten(c, -1, (groups, -1))}
    out = _gated(state_space(of_scan).flatten(2), z, given, groups)
    weight = given.get("outproj_weight")
    return out if weight is None else F.linear(out, weight, given.get("outproj_bias"))


def _gated(x: Tensor, z: Tensor, given: Arguments, groups: int) -> Tensor:
    """RMS norm of each group's features [B, T, C], multiplied with silu(z) before or after it."""
    weight: Tensor | None = given.get("rmsnorm_weight")
    before: bool = given.get("norm_before_gate", True)
    gate = F.silu(z)
    if weight is None:
        return x * gate
    dtype = torch.promote_types(torch.float32, x.dtype)
    wide = torch.unflatten((x if before else x * gate).to(dtype), -1, (groups, -1))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + given.get("rmsnorm_eps", 1e-6))
    normed = (wide.flatten(2) * weight.to(dtype)).to(x.dtype)
    return normed * gate if before else normed


_SILU = ("silu", "swish")

PACKING = ("seq_idx", "cu_seqlens")
"""Arguments that separate packed sequences: the number of each token's, int [B, T], or their ends in one row."""

KINDS = {
    "causal_conv1d_fn": Kind(_like("hidden_states"), _convolution, tokens=2, tokens_of_operands=2),
    "chunk_gated_delta_rule": Kind(_like("value"), _delta_rule, pair=True),
    "chunk_kda": Kind(_like("value"), None, pair=True),
    "mamba_chunk_scan_combined": Kind(_like("hidden_states"), _state_space),
    "mamba_split_conv1d_scan_combined": Kind(_fused, _fused_state_space),
    "mamba_inner_fn": Kind(_projected, None, tokens_of_operands=2),
    "selective_scan_fn": Kind(_like("hidden_states"), None, tokens=2, tokens_of_operands=2),
}
"""By the name of the function; arguments are named as in transformers' bodies."""
