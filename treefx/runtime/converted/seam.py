"""Where transformers computes attention: one function per model file, which here reads a tree instead of a mask.

Attention modules ask ``ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)`` for a function of query, key, value and
mask. In the files of converted models that name stands for an object which hands out the same functions; given a tree
in place of the mask they compute tree attention, given anything else they are what they were. The tree comes as the
mask, because that argument reaches every attention of every model, is saved by checkpoints with the other inputs of a
block, and is an ordinary input of a compiled one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Expr, Score

__all__ = [
    "Spec",
    "attend_on_tree",
    "attention_modules",
    "eager_or_other",
    "install",
    "is_tree",
    "listen",
    "score_of",
    "tree_of",
]

_NAME = "ALL_ATTENTION_FUNCTIONS"
_SPEC = "treefx_spec"


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


def is_tree(mask: Any, query: Tensor) -> bool:
    """Whether an attention mask is a tree: a mask of one row of queries has no second entry in front."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype is torch.int32
        and mask.dim() == 4
        and mask.shape[0] in (2, 3)
        and query.shape[0] == 1
        and mask.shape[1] == mask.shape[2] == 1
        and mask.shape[3] == query.shape[2]
    )


# Model files ------------------------------------------------------------------------------------------------------


class _Interfaces:
    """Stands for ``ALL_ATTENTION_FUNCTIONS`` in a model file."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def get_interface(self, name: Any, default: Any) -> Any:
        return functools.partial(_attention, self.original.get_interface(name, default))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def __getitem__(self, name: str) -> Any:
        return self.original[name]

    def __contains__(self, name: str) -> bool:
        return name in self.original


def _attention(
    original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """An attention function: query [B, H, T, D], key, value [B, Hkv, T, D] -> [B, T, H, D] and probabilities."""
    if not is_tree(mask, query):
        return original(module, query, key, value, mask, *args, **kwargs)
    return attend_on_tree(module, query, key, value, mask, *args, **kwargs), None


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, whose forward takes its attention function from transformers."""
    return {name: module for name, module in model.named_modules() if _globals_of(module) is not None}


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    """The names of the file in which the forward of an attention module is written."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found if code is not None and _NAME in code.co_names and "get_interface" in code.co_names else None


def eager_or_other(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module would call now."""
    names = _globals_of(module)
    assert names is not None
    interfaces = names[_NAME]
    original = interfaces.original if isinstance(interfaces, _Interfaces) else interfaces
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", "")
    found: Callable[..., Any] = original.get_interface(chosen, names.get("eager_attention_forward"))
    return found


def listen(module: nn.Module) -> None:
    """Let the file of an attention module ask here for its functions."""
    names = _globals_of(module)
    assert names is not None
    if not isinstance(names[_NAME], _Interfaces):
        names[_NAME] = _Interfaces(names[_NAME])


def install(module: nn.Module, spec: Spec) -> None:
    """Let an attention module compute tree attention by a spec where it is given a tree."""
    listen(module)
    if getattr(module, _SPEC, None) != spec:  # compiled blocks are compiled anew for another object
        setattr(module, _SPEC, spec)


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
