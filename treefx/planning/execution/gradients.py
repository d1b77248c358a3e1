"""Sum the gradients of parts outside of ``.grad``, and add them in one final backward.

A part is a step of treefx, not of the caller. Code that the caller attached to a parameter (gradient hooks that clip,
an optimizer that steps as soon as a gradient is accumulated, ``DistributedDataParallel``) expects one backward per
step, with the whole gradient. So autograd runs no part of it while the parts run, and all of it once, on the sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["Gradients"]


class Gradients:
    """Sums of the gradients of several backwards.

    Args:
        apart: returns the leaves with sums outside of `.grad`, and the dtype to sum them in.
    """

    def __init__(self, apart: Callable[[], Mapping[Tensor, torch.dtype]] = dict) -> None:
        self.apart = apart
        self.totals: dict[Tensor, Tensor] = {}
        self._dtypes: Mapping[Tensor, torch.dtype] = {}
        """What ``apart`` said when the backward began."""
        self._owned: set[Tensor] = set()
        """Leaves with a sum in a tensor made here, which shares memory with no other tensor."""
        self._nothing: dict[Tensor, Tensor] = {}
        """Zeros of one element, in the shapes of leaves."""
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None, int]] = []
        """State before `add`: a leaf, its `.grad`, a copy of that, and its version."""

    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], own: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Run a backward: sum the gradients of all leaves, and return those of ``own``.

        The latter are not summed.

        No hook of a leaf runs, and no `.grad` changes.
        """
        self._dtypes = self.apart()
        skipped = {id(leaf) for leaf in own}
        leaves = [leaf for leaf in dict.fromkeys(_leaves(roots)) if id(leaf) not in skipped]
        with _collecting(leaves, self._collect):
            found = torch.autograd.grad(roots, [*own, *leaves], gradients, allow_unused=True)
        for leaf, gradient in zip(leaves, found[len(own) :], strict=True):
            if gradient is not None and gradient.is_sparse | (type(gradient) is not Tensor):
                self._add(leaf, gradient)
        return list(found[: len(own)])

    def forget(self) -> None:
        """Forget all sums."""
        self.totals, self._owned = {}, set()

    def add(self) -> None:
        """Add the sums to `.grad` by one backward of autograd, which runs the hooks of all leaves.

        If it raises, or later, `put_back` restores every `.grad`.
        """
        elsewhere = self.apart()
        leaves = [leaf for leaf in self.totals if leaf not in elsewhere]
        for leaf in leaves:
            before = leaf.grad
            copy, version = (None, 0) if before is None else (before.clone(), before._version)
            self._before.append((leaf, before, copy, version))
        by_device: dict[torch.device, list[Tensor]] = {}
        for leaf in leaves:
            by_device.setdefault(leaf.device, []).append(leaf)
        held = [[self.totals.pop(leaf) for leaf in found] for found in by_device.values()]
        apply: Any = _Deliver.apply
        roots = [apply(sums, *found) for sums, found in zip(held, by_device.values(), strict=True)]
        if roots:
            torch.autograd.backward(roots)

    def put_back(self) -> None:
        """Restore `.grad` of all leaves, the tensor and its values, as `add` found it."""
        with torch.no_grad():
            for leaf, before, copy, version in self._before:
                if before is not None and copy is not None and before._version != version:
                    before.copy_(copy)
                leaf.grad = before
        self._before = []

    def _collect(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        """Take a gradient in place of autograd's accumulation; return one that takes no memory."""
        if gradient.is_sparse or type(gradient) is not Tensor:
            return None  # `backward` adds it
        self._add(leaf, gradient)
        nothing = self._nothing.get(leaf)
        if nothing is None:
            nothing = self._nothing[leaf] = gradient.new_zeros(()).expand(gradient.shape)
        return nothing

    def _add(self, leaf: Tensor, gradient: Tensor) -> None:
        dtype = self._dtypes.get(leaf, gradient.dtype)
        total = self.totals.pop(leaf, None)
        if total is None:
            self.totals[leaf] = gradient.to(dtype)
        elif total.is_sparse:
            self.totals[leaf] = gradient + total  # dense if either is
        elif leaf in self._owned or _is_alone(total):
            self.totals[leaf] = total.add_(gradient)
            self._owned.add(leaf)
        else:
            self.totals[leaf] = total + gradient
            self._owned.add(leaf)


class _Deliver(torch.autograd.Function):
    """Return sums as the gradients of leaves.

    They are released here, so that autograd keeps them uncopied.
    """

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.sums = sums
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        sums = tuple(ctx.sums)
        ctx.sums.clear()
        return (None, *sums)


@contextmanager
def _collecting(leaves: Sequence[Tensor], collect: Callable[[Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``collect(leaf, gradient)`` in place of all hooks on the gradients of leaves."""
    silenced: list[tuple[dict[int, Any], int, Any]] = []
    handles: list[Any] = []
    try:
        for leaf in leaves:
            hooks = leaf._backward_hooks or {}
            for key, hook in list(hooks.items()):
                silenced.append((hooks, key, hook))
                hooks[key] = _no_hook
            handles.append(leaf.register_hook(partial(collect, leaf)))  # type: ignore[no-untyped-call]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, key, hook in silenced:
            if key in hooks:  # else its owner has removed it
                hooks[key] = hook


def _no_hook(gradient: Tensor) -> None:
    """Stands where a hook was."""


def _is_alone(tensor: Tensor) -> bool:
    """Whether the caller's variable is all that refers to a tensor and its memory."""
    return (
        sys.getrefcount(tensor) <= _REFERENCES
        and getattr(tensor, "_use_count", lambda: 2)() == 1
        and _storage_uses(tensor.untyped_storage()) == 2  # the tensor's and that of the argument
    )


_REFERENCES = 3
"""Of the caller, of the argument, and of the argument of `getrefcount`."""


def _storage_uses(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the autograd graph above `roots`."""
    waiting: list[Any] = [root.grad_fn for root in roots]
    found: list[Tensor] = [root for root in roots if root.is_leaf]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        for source, _ in node.next_functions:
            waiting.append(source)  # noqa: PERF401, no call per node
    return found
