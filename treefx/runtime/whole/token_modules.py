"""Trace one operator in place of a module that computes token by token and cuts the graph.

Many mixtures of experts select tokens by values: they loop over ``nonzero()``, split by ``tolist()``, or call functions
that forbid tracing. Dynamo then cuts the model in every layer, and no graph but the first gets token ids. Where tracing
fails in a module of transformers that has hidden states as its only argument, ``prove_token_module`` runs it on
examples. If it computes token by token, Dynamo starts over, and ``treefx::token_module`` stands for the call.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from treefx.passes.trace.token_modules import TokenModule, register_module
from treefx.runtime.whole.token_proof import prove_token_module

__all__ = ["is_provable", "token_module_instead"]

_LIBRARY = "transformers."
"""Whose modules are proved. In other code, examples could miss a branch that only rare values take."""
_SEPARATOR = ";"
_MOST_MODULES = 4
"""Instances per line of a model that are taken whole: each one compiles the caller's frame again."""
_DIMS = (2, 3)
_numbers = itertools.count()
_cutting: WeakSet[Any] = WeakSet()
"""Forwards of modules that cut a graph."""
_proofs: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[str, TokenModule] | None]] = WeakKeyDictionary()
"""By module and form of the call, the key of its operator, or None if the law is not proved."""
_instances: WeakKeyDictionary[Any, dict[str, WeakSet[nn.Module]]] = WeakKeyDictionary()
"""By code and by the module's place in its arguments, the instances that are taken whole."""


def token_module_instead(
    function: Any, tx: Any, args: Any, kwargs: Any
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """Return ``treefx::token_module`` in place of a module's forward; None for all other calls."""
    if function not in _cutting:
        return None
    given = _hidden_states(function, args, kwargs)
    found = None if given is None else _proved(args[0].value, given)
    if given is None or found is None or not _may_compile(tx, args[0]):
        return None
    key, known = found
    install_guard(args[0].source.make_guard(GuardBuilder.ID_MATCH))
    constants = [ConstantVariable.create(key), ConstantVariable.create(_SEPARATOR.join(known.names))]
    return _run_one if known.one else _run, [*constants, args[0], given], {}


def is_provable(function: Any, tx: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a module that cut a graph can be taken whole, and is in the next trace."""
    given = None if function in _cutting else _hidden_states(function, args, kwargs)
    if given is None or _proved(args[0].value, given) is None or not _may_compile(tx, args[0]):
        return False
    _cutting.add(function)
    return True


def _run(key: str, names: str, module: nn.Module, hidden: Tensor) -> Any:
    module.training  # noqa: B018  (a guard: another mode has another proof)
    held = [_held(module, name) for name in names.split(_SEPARATOR)]
    return tuple(torch.ops.treefx.token_module([hidden, *held], key))


def _run_one(key: str, names: str, module: nn.Module, hidden: Tensor) -> Any:
    return _run(key, names, module, hidden)[0]


def _held(module: Any, name: str) -> Any:
    """Return a parameter or buffer by its path."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _hidden_states(function: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Return the hidden states of a call of a module's forward with no other argument; else None."""
    module = getattr(args[0], "value", None) if args else None
    if not isinstance(module, nn.Module) or getattr(args[0], "source", None) is None:
        return None
    if inspect.getattr_static(type(module), "forward", None) is not function:
        return None
    if not str(getattr(function, "__module__", "")).startswith(_LIBRARY):
        return None
    given = [item.realize() for item in (*args[1:], *kwargs.values())]
    if len(given) != 1 or not isinstance(given[0], TensorVariable) or (kwargs and not _is_first(function, kwargs)):
        return None
    example = given[0].as_proxy().node.meta.get("example_value")
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() not in _DIMS:
        return None
    return given[0] if isinstance(example.shape[-1], int) else None


def _is_first(function: Any, kwargs: Any) -> bool:
    return [*inspect.signature(function).parameters][1:2] == [*kwargs]


def _proved(module: nn.Module, given: Any) -> tuple[str, TokenModule] | None:
    """Return key and description of a module that is proved for a form of its argument."""
    example = given.as_proxy().node.meta["example_value"]
    device = example.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    form = example.shape[-1], example.dim(), example.dtype, autocast
    modes = tuple(item.training for item in module.modules()), tuple(x.requires_grad for x in module.parameters())
    proofs = _proofs.setdefault(module, {})
    if (form, modes) not in proofs:
        known, key = prove_token_module(module, *form), f"{type(module).__qualname__}:{next(_numbers)}"
        if known is not None:
            register_module(key, known)
        proofs[form, modes] = None if known is None else (key, known)
    return proofs[form, modes]


def _may_compile(tx: Any, module: Any) -> bool:
    """Return whether few enough modules stood at a place, each of which compiles the frame again."""
    places = _instances.setdefault(tx.output.root_tx.f_code, {})
    name = module.source.name
    seen = places.setdefault(str(name() if callable(name) else name), WeakSet())
    if module.value not in seen and len(seen) >= _MOST_MODULES:
        return False
    seen.add(module.value)
    return True
