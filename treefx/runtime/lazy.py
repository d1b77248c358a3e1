"""Expand outputs to rows lazily, when the caller reads them.

A model returns its logits together with the loss, and most training steps never read them. ``LazyRows`` stands for such
a ``[B, T, ...]`` output: it has shape, dtype and ``requires_grad``, and is computed from its packed value at the first
operation that touches it. Its gradient, if one ever arrives, comes from running the graph once more with that output
differentiable; the graph remembers, and the next call is compiled that way from the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.utils._pytree import tree_map_only

from treefx.errors import UnsupportedError
from treefx.kernels.first_derivatives import once_differentiable
from treefx.kernels.memory import lasting
from treefx.runtime.records import now, stepped_since
from treefx.runtime.shapes import COMPARED_BYTES, bits

__all__ = ["Deferred", "Given", "LazyRows", "Marks", "WATCHED", "lazy_rows", "marks", "name_of_input", "watched"]

aten = torch.ops.aten
_RESHAPING = {aten.resize_, aten.resize_as_, aten.set_}
"""They give a tensor other memory in place, which aliases of it must not see."""


class Deferred:
    """How to compute one output on rows, at most once.

    Args:
        shape: Shape on rows.
        like: The packed value, for dtype and device.
        compute: Gives the value on rows, without gradient.
        differentiate: Given the gradient on rows, gives those of ``inputs``.
        inputs: The tensors of the call that require grad.
    """

    def __init__(
        self,
        shape: Sequence[int],
        like: Tensor,
        compute: Callable[[], Tensor],
        differentiate: Callable[[Tensor], Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), like.dtype, like.device
        self.inputs, self.differentiate = list(inputs), differentiate
        self._compute = compute
        self._rows: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether the rows are there."""
        return self._rows is not None

    @property
    def rows(self) -> Tensor:
        """The value on rows."""
        if self._rows is None:
            with lasting(), torch.no_grad():  # the first reader's mode is not that of the next one
                self._rows = self._compute()
        return self._rows

    @staticmethod
    def of(rows: Tensor) -> Deferred:
        """An output that is there already."""
        made = Deferred(rows.shape, rows, lambda: rows, lambda grad: (), ())
        made._rows = rows
        return made


class LazyRows(Tensor):
    """Stand for a tensor on rows that is computed by the first operation on it."""

    deferred: Deferred
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, deferred: Deferred) -> LazyRows:
        make = torch.Tensor._make_wrapper_subclass
        result = make(cls, deferred.shape, dtype=deferred.dtype, device=deferred.device)
        torch._C._set_throw_on_mutable_data_ptr(result)  # C++ that takes the address gets an error, not zero
        return result

    def __init__(self, deferred: Deferred) -> None:
        self.deferred = deferred

    @property
    def rows(self) -> Tensor:
        """The plain tensor, without gradient."""
        return self.deferred.rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return LazyRows(args[0].deferred)
        if func.overloadpacket in _RESHAPING and isinstance(args[0], LazyRows):
            raise UnsupportedError(
                f"an output that is computed when it is read keeps its shape and memory, got {func}; call it on a "
                "copy: output.clone(), or compile with options={'lazy_outputs': False}"
            )
        plain = tree_map_only(LazyRows, lambda lazy: lazy.rows, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["rows"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> LazyRows:
        return LazyRows(Deferred.of(inner["rows"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.rows.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.rows.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.rows)

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a NumPy array; ``force`` as for any tensor."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.rows.numpy(force=force)

    def tolist(self) -> Any:
        """The value as nested lists."""
        return self.rows.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy else array

    # These methods bypass __torch_dispatch__: they need memory, which only the plain tensor has.

    def data_ptr(self) -> int:
        """The address of the value."""
        return self.rows.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the value.

        Code that traces a function of this tensor reads its metadata alone.
        """
        return super().untyped_storage() if TracingContext.try_get() is not None else self.rows.untyped_storage()

    def is_shared(self) -> bool:
        """Whether other processes can see the value."""
        return bool(self.rows.is_shared())  # type: ignore[no-untyped-call]

    def share_memory_(self) -> LazyRows:
        """Let other processes see the value."""
        self.rows.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __dlpack__(self, **options: Any) -> Any:
        return self._exported().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.rows.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._exported().__cuda_array_interface__

    def _exported(self) -> Tensor:
        """The value, which refuses to leave PyTorch where this tensor would."""
        return self.rows.detach().requires_grad_() if self.requires_grad else self.rows

    @property
    def data(self) -> Tensor:
        """The value out of sight of autograd; another one may be put in its place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            wanted, got = (f"{list(x.shape)} of {x.dtype}" for x in (self, value))
            raise UnsupportedError(f"the data of this output must stay {wanted}, got {got}")
        self.deferred = Deferred.of(value.detach())


class _Attach(torch.autograd.Function):
    """Hangs a lazy output into the autograd graph of the call's inputs."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, *inputs: Tensor) -> LazyRows:
        ctx.deferred = deferred
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return LazyRows(deferred)

    @staticmethod
    @once_differentiable("an output that is computed when it is read")
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        inputs = ctx.saved_tensors  # raises if an input was changed in place since the forward
        if grad is None:
            return (None,) * (1 + len(inputs))
        plain = grad.rows if isinstance(grad, LazyRows) else grad
        return (None, *ctx.deferred.differentiate(plain))


def lazy_rows(deferred: Deferred) -> Tensor:
    """The lazy tensor of a deferred output, differentiable where gradients are on."""
    if torch.is_grad_enabled() and deferred.inputs:
        result: Tensor = _Attach.apply(deferred, *deferred.inputs)  # type: ignore[no-untyped-call]
        return result
    return LazyRows(deferred)


_PLAIN = (Tensor, torch.nn.Parameter)


class Given:
    """The arguments of a call.

    Args:
        args: As they came.
        roles: "parameter", "buffer" or "input" of each.
        names: Names of the graph's inputs.
        watched: Positions of the parameters of which some numbers are kept.
    """

    def __init__(self, args: Sequence[Any], roles: Sequence[str], names: Sequence[str], watched: Sequence[int]) -> None:
        self._roles, self._names, self._watched = roles, names, watched
        with lasting():
            self._marks = marks(args, watched)
            self.args = [_copy(x) if role == "input" else x for x, role in zip(args, roles, strict=True)]
        self._versions = _versions(self.args)
        devices = {"cpu", next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")}
        self._autocast = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in sorted(devices)]
        self._time = now()

    def check(self, what: str) -> None:
        """Raise if the graph would compute something else by now.

        Raises:
            UnsupportedError: An argument has changed since.
        """
        changed = next(self._changed(), None)
        if changed is not None:
            raise UnsupportedError(
                f"{what} for the first time must come before the weights and inputs of the call change, but "
                f"{self._roles[changed]} {self._names[changed]} has changed since (an optimizer step, or another batch "
                "in the same tensor?). Positions under the padding, and large logits, are left out until the caller "
                "reads them, and computed by running the graph again. Read the output before the step "
                "(logits = out.logits.clone()), or compile with options={'lazy_outputs': False}, which computes all "
                "outputs within the call"
            )

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Autocast as in the call: Dynamo guards it, and the reader may be outside."""
        with ExitStack() as stack:
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield

    def _changed(self) -> Iterator[int]:
        stepped = stepped_since(self._time)
        for i, (x, before, after) in enumerate(zip(self.args, self._versions, _versions(self.args), strict=True)):
            if before != after or (isinstance(x, Tensor) and id(x) in stepped):
                yield i
        now = marks(self.args, self._watched)  # after versions: memory that was given back is not looked at
        if any(not torch.equal(a, b) for a, b in zip(now, self._marks, strict=True)):
            yield self._watched[0]


def name_of_input(node: fx.Node) -> str:
    """Name an input of Dynamo's graph as the user does: ``layers.0.weight``, ``input_ids``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    parts = re.findall(r"\['(\w+)'\]|\.(?!_)(\w+)", str(name() if callable(name) else name))
    words = [left or right for left, right in parts if (left or right) != "self"]
    return ".".join(words) or str(node.target)


def _versions(args: Sequence[Any]) -> list[Any]:
    """Return versions of all tensors, and addresses of plain ones, in one pass.

    Models have many parameters.
    """
    counted = [None if not isinstance(x, Tensor) or x.is_inference() else x._version for x in args]
    return [(x.data_ptr() if type(x) in _PLAIN else None, count) for x, count in zip(args, counted, strict=True)]


def _copy(x: Any) -> Any:
    """Copy a small-integer tensor with its strides; return anything else unchanged."""
    if type(x) is not Tensor or x.is_floating_point() or x.is_complex() or x.numel() == 0:
        return x
    span = 1 + sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    if span * x.element_size() > COMPARED_BYTES:
        return x
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


WATCHED, NUMBERS = 16, 64
"""How many parameters are watched, and how many numbers of each."""
Marks: TypeAlias = list[Tensor]


def watched(args: Sequence[Any], roles: Sequence[str]) -> list[int]:
    """Positions of the smallest parameters, trained ones first."""
    plain = [i for i, (x, role) in enumerate(zip(args, roles, strict=True)) if role == "parameter" and _is_plain(x)]
    return sorted(plain, key=lambda i: (not args[i].requires_grad, args[i].numel()))[:WATCHED]


def marks(args: Sequence[Any], positions: Sequence[int]) -> Marks:
    """The first numbers of each, in memory of their own."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for i in positions:
            x = args[i].detach()
            kinds.setdefault((x.device, x.dtype), []).append(x.as_strided((min(NUMBERS, x.numel()),), (1,)))
        return [bits(torch.cat(parts)) for parts in kinds.values()]


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0 and x.is_contiguous()
