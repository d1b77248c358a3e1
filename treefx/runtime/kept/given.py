"""Keep the inputs of a call for outputs that are computed after it.

An unread lazy output may be computed, or differentiated, by running the graph once more. That is the call's output only
with the call's weights and inputs: token ids and masks are copied, changes of the others are detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels.lasting import lasting
from treefx.runtime.kept.marks import marks
from treefx.runtime.kept.optimizer_clock import now, stepped_since
from treefx.runtime.kept.proof import COMPARED_BYTES

__all__ = ["Given", "name_of_input"]

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
