"""Keep rows packed: a tensor ``[B, T, ...]`` stored as one value per distinct token.

A backbone on distinct tokens returns ``PackedRows``. Token-wise functions of them (an LM head, a cap, a log-softmax)
run once per distinct token, with a packed result; ``row_laws`` lists these functions. Functions that gather numbers per
row (the log-probability of a label) expand those numbers alone. All other functions get a tensor with values expanded
at that moment, and its gradient is the sum over rows::

    packed [N, H] --lm_head, log_softmax--> [N, V] --gather(label)--> numbers of rows [B, T]
           \\                                                             (backward: treefx::restore_pick)
            `--any other function--> rows [B, T, H]                      (backward: treefx::restore)

Autograd sees an ordinary tensor: it has a ``grad_fn`` that leads to the packed value. Functions with a law take the
packed value itself instead, which is the same gradient by a shorter way, as long as nothing but this module has touched
the tensor: after a change in place, a hook or an ``autograd.Function`` the way over rows is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from treefx.errors import UnsupportedError
from treefx.kernels.expand import expand, restore
from treefx.runtime.lazy import Deferred, LazyRows

__all__ = ["Held", "PackedRows", "by_law", "packed_rows", "rows_among", "version"]

aten = torch.ops.aten

Law = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""Given a function and its arguments, its result, or NotImplemented if it is to run on rows."""

_LAWS: dict[Any, Law] = {}


def by_law(functions: Iterable[Any]) -> Callable[[Law], Law]:
    """Register how functions are computed on packed rows."""

    def register(law: Law) -> Law:
        _LAWS.update(dict.fromkeys(functions, law))
        return law

    return register


class Held:
    """Hold a packed value [N, ...], and cached functions of all of it.

    Args:
        packed: The value.
        origin: The value it equals, without history.
    """

    def __init__(self, packed: Tensor, origin: Held | None = None) -> None:
        self.packed = packed
        self._origin = origin
        self.known: dict[Any, Any] = {}

    @property
    def origin(self) -> Held:
        """Return the common origin of all equal values without history."""
        return self if self._origin is None else self._origin.origin

    def detached(self) -> Held:
        """The same values without history."""
        return Held(self.packed.detach(), self) if self.packed.requires_grad else self


class _Family:
    """Tensors that would share memory as rows do: an output, its slices, its views."""

    def __init__(self, count: Callable[[Tensor | None, int], None] | None) -> None:
        self.count = count
        self.members: list[weakref.ref[PackedRows]] = []
        self.used = False
        """Whether gradients may flow by without passing a member."""
        self.read: list[tuple[weakref.ref[PackedRows], int]] = []
        """Members of which others hold the memory, and their versions then."""

    def others(self, member: PackedRows) -> list[PackedRows]:
        """Return the other living members."""
        self.members = [ref for ref in self.members if ref() is not None]
        return [found for ref in self.members if (found := ref()) is not None and found is not member]

    def note(self, weight: Tensor | None, positions: int) -> None:
        """Count positions that something was computed of: a product with a weight, or rows."""
        if self.count is not None:
            self.count(weight, positions)

    def check(self, member: PackedRows) -> None:
        """Raise if another member was changed through its shared memory."""
        for ref, before in self.read:
            other = ref()
            if other is not None and other.deferred is not member.deferred and _plainly(version, other) != before:
                raise UnsupportedError(_CHANGED.format("another view of it was changed in place"))


_CHANGED = (
    "under treefx.convert hidden states and logits are expanded to rows when they are read, and views of them have no "
    "common memory, but {}; change a copy (clone()), or convert the model without pack_lm_head"
)
_HOOKED = (
    "under treefx.convert hidden states and logits have a gradient on rows only if nothing was computed of them on "
    "distinct tokens before, but it was; ask for the gradient before that (hooks, retain_grad), or convert the model "
    "without pack_lm_head"
)


class PackedRows(LazyRows):
    """Store a tensor [*lead, ...] as ``held.packed`` [N, ...] and ``token_of``.

    ``token_of`` is int64 [*lead].
    """

    held: Held
    token_of: Tensor
    places: Tensor
    """int64 [*lead]: which position of the family each one is."""
    family: _Family
    node: Any
    """The ``grad_fn`` that leads to the packed value and nowhere else."""
    hooked: bool
    """Whether a hook or ``retain_grad`` needs the gradient on rows."""
    taken: PackedRows | None = None
    """Its next form."""
    behind: PackedRows | None = None
    """The same, where the gradient of the packed value passes FSDP's function."""

    @staticmethod
    def __new__(cls, deferred: Deferred, *_: Any) -> PackedRows:
        return LazyRows.__new__(cls, deferred)  # type: ignore[return-value]

    def __init__(self, deferred: Deferred, held: Held, index: tuple[Tensor, Tensor], family: _Family) -> None:
        super().__init__(deferred)
        self.held, (self.token_of, self.places), self.family = held, index, family
        self.node, self.hooked = None, False
        family.members.append(weakref.ref(self))

    @property
    def packed(self) -> Tensor:
        """One value per distinct token."""
        return self.held.packed

    @property
    def is_packed(self) -> bool:
        """Return whether the packed value equals this tensor, in value and in gradient."""
        if self.deferred.ready or self.hooked:
            return False
        self.family.check(self)
        grad_fn, differentiable = _plainly(lambda x: (x.grad_fn, x.requires_grad), self)
        return bool(grad_fn is self.node and differentiable == self.packed.requires_grad)

    @property
    def rows(self) -> Tensor:
        """The values on rows, in memory that is this tensor's from now on."""
        if not self.deferred.ready:
            self.family.note(None, self.token_of.numel())
            self.family.check(self)
            self.family.read.append((weakref.ref(self), _plainly(version, self)))
        return self.deferred.rows

    @property
    def expanded(self) -> Tensor:
        """The values on rows, to be read once."""
        if self.deferred.ready:
            return self.deferred.rows
        self.family.note(None, self.token_of.numel())
        self.family.check(self)
        with torch.no_grad():
            found: Tensor = expand(self.packed.detach(), self.token_of)
        return found

    def become(self, other: PackedRows) -> None:
        """Take over value and history of another tensor: a change in place."""
        self.taken = other
        _plainly(lambda x, y: x.copy_(y), self, other)
        self.taken = None
        self.node = _plainly(lambda x: x.grad_fn, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        law = _LAWS.get(func)
        if law is not None and kwargs.get("out") is None and not torch.compiler.is_compiling():
            args, kwargs = tree_map_only(PackedRows, _behind_fsdp, (args, kwargs))
            found = law(func, args, kwargs)
            if found is not NotImplemented:
                return found
        return _plainly(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default):
            return _same(first)
        if func is aten.view.default and list(args[1]) == list(first.deferred.shape):
            return _same(first)
        if func is aten.copy_.default and isinstance(first, PackedRows) and first.taken is args[1] is not None:
            first.held, first.token_of = args[1].held, args[1].token_of
            first.deferred = _deferred(first.packed, first.token_of)
            return first
        for item, written in _shared(func, args, kwargs or {}):
            if written and any(x.deferred is not item.deferred for x in item.family.others(item)):
                raise UnsupportedError(_CHANGED.format(f"{func} changes one of several in place"))
            _ = item.rows
        plain = tree_map_only(PackedRows, lambda x: x.expanded, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, *plain)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> PackedRows:
        rows = inner["rows"]
        return PackedRows(Deferred.of(rows), Held(rows), (rows, rows), _Family(None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.expanded.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.expanded.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.expanded)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as a NumPy array.

        Read it only while there are views of it, which would not see a change.
        """
        array = super().numpy(force=force)
        if any(x.deferred is not self.deferred for x in self.family.others(self)):
            array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The value as nested lists."""
        return self.expanded.tolist()


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function for which these are tensors like any other."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 under inference mode."""
    return -1 if x.is_inference() else x._version


def rows_among(*given: Any) -> list[PackedRows]:
    """The packed rows among arguments."""
    return [x for x in tree_leaves(given) if isinstance(x, PackedRows)]


def _deferred(packed: Tensor, token_of: Tensor) -> Deferred:
    shape = [*token_of.shape, *packed.shape[1:]]
    return Deferred(shape, packed, lambda: expand(packed.detach(), token_of), lambda grad: (), ())


def _same(x: PackedRows) -> PackedRows:
    """The same memory without history."""
    return PackedRows(x.deferred, x.held.detached(), (x.token_of, x.places), x.family)


def _shared(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[PackedRows, bool]]:
    """Return packed rows with memory that a function returns or writes, and which of the two."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        if alias is not None:
            found += [(x, bool(alias.is_write)) for x in rows_among(given)]
    return found


class _Expand(torch.autograd.Function):
    """From a packed value to its rows, which are not computed; back, the sum over rows."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, token_of: Tensor, make: Callable[[], PackedRows]) -> PackedRows:
        ctx.save_for_backward(token_of)
        ctx.shape = packed.shape
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (token_of,) = ctx.saved_tensors
        like = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(ctx.shape)
        return restore(grad, token_of, like), None, None


def packed_rows(
    packed: Tensor | Held,
    token_of: Tensor,
    view: tuple[_Family, Tensor] | None = None,
    count: Callable[[Tensor | None, int], None] | None = None,
) -> PackedRows:
    """Rows of a packed value.

    Args:
        packed: [N, ...], with one dimension or more per token.
        token_of: int64 [*lead], none negative.
        view: The family of the tensor that these are a view of, and the places in it [*lead].
        count: Called with the weight of a product, or None, and the number of positions that were computed.
    """
    held = packed if isinstance(packed, Held) else Held(packed)
    held = held if torch.is_grad_enabled() else held.detached()
    if view is None:
        view = _Family(count), torch.arange(token_of.numel(), device=token_of.device).view(token_of.shape)
    family, places = view

    def make() -> PackedRows:
        return PackedRows(_deferred(held.packed, token_of), held, (token_of, places), family)

    if not held.packed.requires_grad:
        return make()
    made: PackedRows = _Expand.apply(held.packed, token_of, make)  # type: ignore[no-untyped-call]
    made.node = _plainly(lambda x: x.grad_fn, made)
    return made


# Hooks --------------------------------------------------------------------------------------------------------------

_OF_FSDP = "torch.distributed.fsdp"


def _behind_fsdp(x: PackedRows) -> PackedRows:
    """Move FSDP2's identity, which reduces a module's gradients, to the packed value."""
    node = _plainly(lambda y: y.grad_fn, x)
    made = getattr(type(node), "_forward_cls", None)
    if made is None or made.__name__ != "RegisterPostBackwardFunction" or not made.__module__.startswith(_OF_FSDP):
        return x
    if x.behind is None:
        before = [other for other in x.family.others(x) if other.deferred is x.deferred and other.node is not None]
        source = next((y for y in before if y.is_packed and any(f is y.node for f, _ in node.next_functions)), None)
        if source is None:
            return x
        (packed,) = made.apply(node.param_group, source.packed)
        x.behind = packed_rows(packed, x.token_of, count=x.family.count)
        source.family.used = True
    return x.behind


@by_law([Tensor.register_hook, Tensor.retain_grad])
def _hook(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Register a hook, which gets the gradient on rows; laws no longer apply then.

    FSDP's hook needs only the moment.
    """
    x = args[0]
    hook = kwargs.get("hook", args[1] if len(args) > 1 else None)
    if x.is_packed and (getattr(hook, "__module__", None) or "").startswith(_OF_FSDP):
        return x.packed.register_hook(hook)
    if x.node is not None:
        if x.family.used or x.family.others(x):
            raise UnsupportedError(_HOOKED)
        x.hooked = True
    return NotImplemented


@by_law([torch.autograd.grad, torch.autograd.backward])
def _differentiate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The gradient of rows does not pass them where a law has led it by."""
    inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
    if any(x.node is not None and x.family.used for x in rows_among(inputs)):
        raise UnsupportedError(_HOOKED)
    return NotImplemented
