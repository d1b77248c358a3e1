"""Expand outputs to rows lazily, when the caller reads them.

A model returns its logits together with the loss, and most training steps never read them. ``LazyRows`` stands for such
a ``[B, T, ...]`` output: it has shape, dtype and ``requires_grad``, and is computed from its packed value at the first
operation that touches it. Its gradient, if one ever arrives, comes from running the graph once more with that output
differentiable; the graph remembers, and the next call is compiled that way from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._pytree import tree_map_only

from treefx.errors import UnsupportedError
from treefx.kernels.lasting import lasting

__all__ = ["Deferred", "LazyRows", "lazy_rows"]

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
