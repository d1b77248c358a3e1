"""Plans on a model that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``).

FSDP2 gathers a module's parameters in front of its forward and reduces its gradients behind its backward. With another
number of parts on another rank one's gather meets the other's reduction, and both wait for ever. Here all parameters
are gathered before the first part and stay until gradients are reduced, once, after the last; the hooks that would do
both in between, and cut Dynamo's graph, are off for so long. The price is that of ``reshard_after_forward=False``: a
rank holds all parameters, and all gradients of its parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from treefx.planning.execution.ranks import Ranks, agree
from treefx.runtime.records import find

__all__ = ["Sharded"]

_OF_FSDP = "torch.distributed.fsdp"
_MANAGED = "_is_fsdp_managed_module"
"""Makes Dynamo treat parameters as inputs of the call, and guard them less."""


class Sharded(Ranks):
    """The ranks of sharded models.

    Args:
        roots: FSDP modules in no other FSDP module.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.roots = roots
        self.modules: list[Any] = [x for root in roots for x in root.modules() if isinstance(x, FSDPModule)]
        found = (group for module in self.modules for group in _parameter_groups_of(module._get_fsdp_state()))
        self._parameter_groups: list[Any] = list(dict.fromkeys(found))
        first = self._parameter_groups[0]
        self.groups, self.device = first.mesh_info.mesh.get_all_groups(), first.device
        self._undo: list[Callable[[], None]] = []
        self._reduced: dict[Tensor, torch.dtype] = {}
        self._shards: list[Tensor] = []

    def begin(self) -> None:
        self._shards = list(self._parameters())
        for root in self.roots:
            root._get_fsdp_state()._lazy_init()
        for module in self.modules:
            module.unshard()
        self._reduced = {x.unsharded_param: x.reduce_dtype or x.unsharded_param.dtype for x in self._fsdp_parameters()}
        self._undo = [undo for root in self.roots for x in root.modules() for undo in _as_written(x)]

    def resident_bytes(self) -> int:
        """The shards and their gradients, and gradients in the dtype they are reduced in."""
        total = 0
        for item in self._fsdp_parameters():
            shard, full = item.sharded_param.to_local(), item.unsharded_param
            wide = item.reduce_dtype if item.reduce_dtype != full.dtype else None
            total += 2 * shard.numel() * shard.element_size() + (full.numel() * wide.itemsize if wide else 0)
        return total

    def reduced(self) -> Mapping[Tensor, torch.dtype]:
        return self._reduced

    def end(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        for run in find(self._parameters()):  # the owner finds it by its shards
            run.report.parameters.update(dict.fromkeys(self._shards))

    def abandon(self) -> None:
        for module in self.modules:
            module.reshard()

    def reduce(self, gradients: Mapping[Tensor, Tensor]) -> None:
        for item in self._fsdp_parameters():
            item.accumulate_unsharded_grad_if_needed()
            item.to_accumulated_grad_if_needed()  # gradients of earlier backwards
            if item.unsharded_param in gradients:
                _add_to(item, gradients[item.unsharded_param])
        self._fill_up()
        for root in self.roots:
            root._get_fsdp_state()._root_post_backward_final_callback()

    def _fill_up(self) -> None:
        """A gradient that any rank has is reduced on all of them; without one here it is 0."""
        if not any(group.reduce_grads for group in self._parameter_groups):
            return
        parameters = list(self._fsdp_parameters())
        there = [item.unsharded_accumulated_grad is not None or _gradient(item) is not None for item in parameters]
        for item, is_here, is_anywhere in zip(
            parameters, there, agree(self, torch.tensor(there)).tolist(), strict=True
        ):
            if is_anywhere and not is_here:
                _add_to(item, torch.zeros_like(item.unsharded_param, dtype=self._reduced[item.unsharded_param]))

    def _fsdp_parameters(self) -> Iterator[Any]:
        """Iterate over FSDP's state of each parameter, in the same order on all ranks."""
        return (item for group in self._parameter_groups for item in group.fsdp_params)

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for root in self.roots for parameter in root.parameters())


def _parameter_groups_of(state: Any) -> list[Any]:
    """List the parameter groups that FSDP2 gathers at once for one module.

    Version 2.11 has one such group or none.
    """
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _gradient(item: Any) -> Tensor | None:
    found: Tensor | None = item.unsharded_param.grad
    return found


def _add_to(item: Any, gradient: Tensor) -> None:
    """Add a gradient to those of earlier backwards that wait to be reduced."""
    parameter = item.unsharded_param
    before = _gradient(item) if item.unsharded_accumulated_grad is None else item.unsharded_accumulated_grad
    total = gradient if before is None else before + gradient
    if total.stride() != parameter.stride():
        total = torch.empty_like(parameter, dtype=total.dtype).copy_(total)
    if item.unsharded_accumulated_grad is None and total.dtype == parameter.dtype:
        parameter.grad = total
    else:
        parameter.grad, item.unsharded_accumulated_grad = None, total


# The module as its author wrote it ------------------------------------------------------------------------------------


def _as_written(module: Any) -> Iterator[Callable[[], None]]:
    """Remove FSDP from a module; yield functions that restore it.

    Its class too: Dynamo guards it, so code compiled with FSDP's hooks never runs without them, nor the reverse.
    """
    if isinstance(module, FSDPModule):
        sharded = type(module)
        module.__class__ = sharded.__mro__[sharded._orig_cls_mro_index]
        yield lambda: setattr(module, "__class__", sharded)
    if module.__dict__.get(_MANAGED, False):
        setattr(module, _MANAGED, False)
        yield lambda: setattr(module, _MANAGED, True)
    for hooks, cast in ((module._forward_pre_hooks, _cast_inputs), (module._forward_hooks, _cast_output)):
        if any(map(_is_of_fsdp, hooks.values())):
            yield _replace_hooks(hooks, cast(_policy_of(module)))


def _is_of_fsdp(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_OF_FSDP)


def _replace_hooks(hooks: OrderedDict[int, Any], instead: Any) -> Callable[[], None]:
    """All hooks stay in their order, with another in the place of FSDP's, or none."""
    before = list(hooks.items())
    hooks.clear()
    for key, hook in before:
        if not _is_of_fsdp(hook):
            hooks[key] = hook
        elif instead is not None:
            hooks[key] = instead

    def undo() -> None:
        hooks.clear()
        hooks.update(before)

    return undo


def _policy_of(module: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    state = _get_module_fsdp_state(module)
    assert state is not None
    return state._mp_policy


def _cast_inputs(policy: Any) -> Any:
    """Return the cast that FSDP applies to a module's inputs; None for none."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    if dtype is None:
        return None

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), dtype)

    return hook


def _cast_output(policy: Any) -> Any:
    """Return the cast that FSDP applies to a module's output; None for none."""
    if policy.output_dtype is None:
        return None

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, policy.output_dtype)

    return hook


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
