"""Let the attention modules of a converted model read a tree in place of a mask.

The forward of an attention module calls ``ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)`` for a function of query,
key, value and mask. Each converted module gets a copy of its forward whose code calls ``treefx_get_interface`` instead,
a method that treefx adds to the class of that object. The method returns the same function; given a tree in place of
the mask the function computes tree attention, given anything else it is unchanged. No name of the model's file and no
class of it changes, so other models of the same file are not affected. The tree is passed as the mask, because that
argument reaches every attention of every model, is saved by checkpoints with the other inputs of a block, and is an
ordinary input of a compiled one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Expr, Score

__all__ = [
    "UNWRAPPED",
    "Spec",
    "attend_on_tree",
    "attention_modules",
    "eager_or_other",
    "install",
    "is_tree",
    "original_of",
    "reads_trees",
    "score_of",
    "tree_of",
    "uninstall",
]

UNWRAPPED = "_old_forward"
"""Where accelerate keeps the forward of a module under the one that it puts in its place."""

_NAME = "ALL_ATTENTION_FUNCTIONS"
_GET, _GET_READING = "get_interface", "treefx_get_interface"
_SPEC = "treefx_spec"
_ORIGINAL = "treefx_original"
"""Attribute of a forward that reads trees: the forward that it is a copy of."""


@dataclass(frozen=True)
class Spec:
    """What one attention of the model is proved to compute, beside being causal.

    The logit is ``cap(scale * q.k)``; a key is visible if it is no padding and less than ``window`` places before the
    query; ``sinks`` tells of a logit per head that takes weight and has no value.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False


# The tree ---------------------------------------------------------------------------------------------------------


def tree_of(subtree_end: Tensor, place: Tensor, seen: Tensor | None) -> Tensor:
    """A tree in the form of a mask, int32 [2, 1, 1, N], or [3, 1, 1, N] with padding.

    Args:
        subtree_end: int32 [N].
        place: [N], what windows count by: the column in the row.
        seen: [N], 0 at padding, which no other token sees; None where there is none.
    """
    rows = [subtree_end, place.to(torch.int32), *([] if seen is None else [seen.to(torch.int32)])]
    return torch.stack(rows)[:, None, None]


def is_tree(mask: Any, query: Any) -> bool:
    """Whether an attention mask is a tree: a mask of one row of queries has no second entry in front."""
    return (
        isinstance(mask, Tensor)
        and isinstance(query, Tensor)
        and mask.dtype is torch.int32
        and mask.dim() == 4
        and mask.shape[0] in (2, 3)
        and query.shape[0] == 1
        and mask.shape[1] == mask.shape[2] == 1
        and mask.shape[3] == query.shape[2]
    )


# Modules ----------------------------------------------------------------------------------------------------------


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, whose forward takes its attention function from transformers."""
    return {name: module for name, module in model.named_modules() if _globals_of(module) is not None}


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    """The names of the file in which the forward of an attention module is written."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found if code is not None and _NAME in code.co_names and _GET in code.co_names else None


def eager_or_other(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module would call now."""
    names = _globals_of(module)
    assert names is not None
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", "")
    found: Callable[..., Any] = names[_NAME].get_interface(chosen, names.get("eager_attention_forward"))
    return found


def install(module: nn.Module, spec: Spec) -> None:
    """Let an attention module compute tree attention by a spec where it is given a tree.

    Raises:
        UnsupportedError: Its forward cannot be copied.
    """
    names = _globals_of(module)
    assert names is not None
    functions = names[_NAME]
    if not getattr(functions, "reads_trees", False):  # those of torchtitan do by themselves
        if not hasattr(type(functions), _GET_READING):
            setattr(type(functions), _GET_READING, _get_interface)
        slot = UNWRAPPED if UNWRAPPED in module.__dict__ else "forward"
        forward = module.__dict__.get(slot, types.MethodType(type(module).forward, module))
        if original_of(forward) is None:
            module.__dict__[slot] = types.MethodType(_reading(_function_of(forward, module)), module)
    if getattr(module, _SPEC, None) != spec:  # compiled blocks are compiled again for another object
        module.__dict__[_SPEC] = spec


def uninstall(module: nn.Module) -> None:
    """Give a module its own forward back."""
    module.__dict__.pop(_SPEC, None)
    for slot in (UNWRAPPED, "forward"):
        original = original_of(module.__dict__.get(slot))
        if original is None:
            continue
        if slot == "forward" and original is type(module).forward:
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = types.MethodType(original, module)


def original_of(forward: Any) -> Any:
    """The function that a forward which reads trees is a copy of; None for any other forward."""
    return getattr(getattr(forward, "__func__", None), _ORIGINAL, None)


def _function_of(forward: Any, module: nn.Module) -> types.FunctionType:
    function = getattr(forward, "__func__", None)
    if not isinstance(function, types.FunctionType) or forward.__self__ is not module:
        raise UnsupportedError(_WRAPPED.format(type(module).__name__, type(forward).__name__))
    return function


@functools.lru_cache(maxsize=64)
def _reading(function: types.FunctionType) -> types.FunctionType:
    """A copy of a forward that calls ``treefx_get_interface`` where the original calls ``get_interface``."""
    code, cells = function.__code__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        code = code.replace(co_names=tuple(_GET_READING if name == _GET else name for name in code.co_names))
    else:  # a decorator: the copy of what it wraps takes its place among the variables that the wrapper closes over
        if not isinstance(inner, types.FunctionType) or not any(_contents(cell) is inner for cell in cells or ()):
            raise UnsupportedError(_WRAPPED.format(function.__qualname__, "decorated function"))
        cells = tuple(types.CellType(_reading(inner)) if _contents(cell) is inner else cell for cell in cells or ())
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__dict__.update(function.__dict__)
    made.__kwdefaults__, made.__doc__, made.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    made.__qualname__, made.__annotations__ = function.__qualname__, function.__annotations__
    setattr(made, _ORIGINAL, function)
    return made


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never assigned
        return None


def _get_interface(functions: Any, name: Any, default: Any) -> Any:
    """``get_interface`` of the attentions of converted models."""
    return reads_trees(functions.get_interface(name, default))


def reads_trees(function: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function that computes tree attention where its mask is a tree, and else is the given one."""
    return functools.partial(_attention, function)


_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")
"""The first arguments of all attention functions of transformers; modules pass them by place or by name."""


def _attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An attention function: query [B, H, T, D], key, value [B, Hkv, T, D] -> [B, T, H, D] and probabilities."""
    given = dict(zip(_ARGUMENTS, args, strict=False))
    given.update(kwargs)
    if not is_tree(given.get("attention_mask"), given.get("query")):
        return original(*args, **kwargs)
    if len(args) > len(_ARGUMENTS):  # their order differs from function to function
        names = list(inspect.signature(original).parameters)
        given.update(zip(names[len(_ARGUMENTS) :], args[len(_ARGUMENTS) :], strict=False))
    first = [given.pop(name) for name in _ARGUMENTS]
    return attend_on_tree(*first, **given), None


# Attention --------------------------------------------------------------------------------------------------------


def attend_on_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> Tensor:
    """Tree attention as the spec of the module says it; arguments as transformers hands them to attention functions.

    Returns:
        [1, N, H, D] in the dtype of the query.

    Raises:
        UnsupportedError: The call asks for something else than was proved of the module.
    """
    spec: Spec | None = getattr(module, _SPEC, None)
    if spec is None:
        raise UnsupportedError(_UNPROVED.format(type(module).__name__))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = Spec(float(scale), softcap, spec.window, s_aux is not None)
    if dropout or is_causal is False or not _agree(asked, spec):
        raise UnsupportedError(_OTHER.format(type(module).__name__, asked, dropout, spec))
    padded = tree.shape[0] == 3
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    sinks = None if s_aux is None else s_aux.to(wide)
    buffers = [*([tree[1, 0, 0]] if spec.window is not None else []), *([tree[2, 0, 0]] if padded else [])]
    out = attend(
        query.to(wide), key.to(wide), value.to(wide), tree[0, 0, 0], score_of(spec, padded=padded), buffers, sinks
    )
    return out.to(query.dtype).transpose(1, 2).contiguous()


_WRAPPED = (
    "treefx.convert replaces the forward of attention modules by a copy that reads trees, and the forward of {} is a "
    "{} that hides the function"
)
_UNPROVED = (
    "under treefx.convert every attention that gets a tree must be proved first, but {} was not; call treefx.convert "
    "after the model has got all its modules"
)
_OTHER = (
    "under treefx.convert an attention must compute what was proved of it, but {} asks for {} with dropout {}, and {} "
    "was proved; convert the model again after its attention was changed, or load it with "
    'attn_implementation="eager" where the attention it was proved with leaves out what is asked for (SDPA a soft cap)'
)


def _agree(asked: Spec, spec: Spec) -> bool:
    close = abs(asked.scale - spec.scale) <= 1e-6 * abs(spec.scale)
    return close and asked.softcap == spec.softcap and asked.sinks == spec.sinks


def score_of(spec: Spec, *, padded: bool) -> Score:
    """The score of a spec; the first buffer is the place of each token if there is a window, the last is ``seen``."""
    logit: Expr = ("mul", ("dot",), ("const", spec.scale))
    if spec.softcap is not None:
        cap = ("const", spec.softcap)
        logit = ("mul", ("tanh", ("div", logit, cap)), cap)
    visible: list[Expr] = []
    if spec.window is not None:
        distance = ("sub", ("load", 0, ("q",)), ("load", 0, ("k",)))
        visible.append(("lt", distance, ("const", spec.window)))
    if padded:
        visible.append(("ne", ("load", len(visible), ("k",)), ("const", 0)))
    return Score(logit, ("and", *visible) if len(visible) == 2 else visible[0] if visible else None)
