"""Let the attention modules of a converted model read a tree in place of a mask.

The forward of an attention module calls ``ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)`` for a function of query,
key, value and mask. Each converted module gets a copy of its forward whose code calls ``treefx_get_interface`` instead,
a method that treefx adds to the class of that object. The method returns the same function; given a tree in place of
the mask the function computes tree attention, given anything else it is unchanged. Older files, and those that come
with a checkpoint, write ``ALL_ATTENTION_FUNCTIONS[name]`` and name their eager function: there the copy reads both
under separate names, ``treefx_ALL_ATTENTION_FUNCTIONS`` and so on. No name and no class of the model's file changes,
so other models of the same file are not affected. The tree is passed as the mask, because that argument reaches every
attention of every model, is saved by checkpoints with the other inputs of a block, and is an ordinary input of a
compiled one.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Score, walk

__all__ = [
    "ORIGINAL",
    "UNWRAPPED",
    "Read",
    "Stated",
    "attend_on_tree",
    "attention_modules",
    "drop_stale_forwards",
    "eager_or_other",
    "expect_trees",
    "install",
    "is_tree",
    "mark_copy",
    "original_of",
    "own_forward",
    "put_forward",
    "reads_trees",
    "running_on_tree",
    "tree_of",
    "uninstall",
]

UNWRAPPED = "_old_forward"
"""Where accelerate keeps the forward of a module under the one that it puts in its place."""

_NAME = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_GET, _GET_READING = "get_interface", "treefx_get_interface"
_OWN = "treefx_{}"
"""Under this name a copied forward finds what reads trees, in the globals of the model's file."""
_SCORES = "treefx_scores"
"""Attribute of an attention module: its scores, by the size of the tree."""
ORIGINAL = "treefx_original"
"""Attribute of a forward that reads trees: the forward that it is a copy of."""
_OF_CLASS = "treefx_of_class"
"""Attribute of a module with a forward that reads trees: true if it copies the forward of the class."""


@dataclass(frozen=True, eq=False)
class Read:
    """Describe one buffer of a score: a plane of the tree, or a table.

    Planes are known by number, float32 by bits or int32.
    """

    plane: int
    is_float: bool
    table: Tensor | None

    def equals(self, other: Read) -> bool:
        """Whether both read the same numbers; those of a plane are the tree's."""
        if self.table is None or other.table is None:
            return (self.plane, self.is_float, self.table) == (other.plane, other.is_float, other.table)
        ours, others = self.table, other.table
        return ours.dtype is others.dtype and ours.shape == others.shape and torch.equal(ours, others.to(ours.device))

    def of(self, tree: Tensor) -> Tensor:
        """The buffer, for a call with this tree."""
        if self.table is not None:
            return self.table
        plane = tree[self.plane, 0, 0]
        return plane.view(torch.float32) if self.is_float else plane


@dataclass(frozen=True, eq=False)
class Stated:
    """Hold the proved score of one attention of the model, which is causal.

    Attributes:
        score: In packed indices, its loads in the order of ``reads``.
        reads: Its buffers.
        scale, softcap: The numbers that the model hands to its attention function, around the product q.k.
        heads: The number of query heads that the score was proved for.
        has_sinks: Whether one logit per head takes weight and has no value.
    """

    score: Score
    reads: tuple[Read, ...]
    scale: float
    softcap: float | None = None
    heads: int = 0
    has_sinks: bool = False

    asks_of_heads: bool = field(init=False)
    """Whether the score differs from head to head: a field, because Dynamo reads it while it traces blocks."""

    def __post_init__(self) -> None:
        expressions = [expr for expr in (self.score.value, self.score.visible) if expr]
        object.__setattr__(self, "asks_of_heads", any(item == ("head",) for x in expressions for item in walk(x)))

    def equals(self, other: Stated) -> bool:
        """Whether both state the same."""
        fields = ("score", "scale", "softcap", "heads", "has_sinks")
        same = all(getattr(self, name) == getattr(other, name) for name in fields)
        pairs = zip(self.reads, other.reads, strict=False)
        return same and len(self.reads) == len(other.reads) and all(x.equals(y) for x, y in pairs)

    def on(self, device: torch.device) -> Stated:
        """The same with its tables on a device."""
        reads = tuple(x if x.table is None else replace(x, table=x.table.to(device)) for x in self.reads)
        return replace(self, reads=reads)


# The tree ---------------------------------------------------------------------------------------------------------


def tree_of(subtree_end: Tensor, planes: Sequence[Tensor], size: int | None = None) -> Tensor:
    """A tree in the form of a mask, int32 [size, 1, 1, N], at least two of them.

    Its size says which scores read it: modules keep those of several calls apart by it, also where a checkpoint runs a
    block again after a later call.

    Args:
        subtree_end: int32 [N].
        planes: int32 [N] each, values of tokens that scores read.
        size: How many entries there are; the last one is repeated.
    """
    rows = [subtree_end, *planes]
    rows += [rows[-1]] * (max(2, size or 0) - len(rows))
    return torch.stack(rows)[:, None, None]


def is_tree(mask: Any, query: Any) -> bool:
    """Return whether an attention mask is a tree.

    A mask of one row of queries has no second entry in front.
    """
    return (
        isinstance(mask, Tensor)
        and isinstance(query, Tensor)
        and mask.dtype is torch.int32
        and mask.dim() == 4
        and mask.shape[0] > 1
        and query.shape[0] == 1
        and mask.shape[1] == mask.shape[2] == 1
        and mask.shape[3] == query.shape[2]
    )


# Modules ----------------------------------------------------------------------------------------------------------


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find modules, by name, that take their attention function from transformers."""
    return {name: module for name, module in model.named_modules() if _globals_of(module) is not None}


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    """The names of the file in which the forward of an attention module is written."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found if code is not None and _NAME in code.co_names and _NAME in found else None


def eager_or_other(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module would call now."""
    names = _globals_of(module)
    assert names is not None
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", "")
    functions, eager = names[_NAME], names.get(_EAGER)
    get = getattr(functions, _GET, None) or functions.get  # older ones are a dict
    found: Callable[..., Any] = get(chosen, eager)
    return found


def install(module: nn.Module, stated: Stated, size: int) -> None:
    """Make an attention module compute tree attention for trees of this size.

    Raises:
        UnsupportedError: Its forward cannot be copied.
    """
    names = _globals_of(module)
    assert names is not None
    functions = names[_NAME]
    if not getattr(functions, "reads_trees", False):  # those of torchtitan do by themselves
        if _GET not in inspect.unwrap(type(module).forward).__code__.co_names:
            _name_own(names)
        elif not hasattr(type(functions), _GET_READING):
            setattr(type(functions), _GET_READING, _get_interface)
        slot, function = own_forward(module)
        if function is not None:
            put_forward(module, slot, _reading(function))
    known = module.__dict__.get(_SCORES, {})
    if known.get(size) is not stated:  # compiled blocks are compiled again for another object
        module.__dict__[_SCORES] = {**known, size: stated}


class _Functions:
    """The attention functions of a model's file, each of which reads trees."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return reads_trees(self.functions[name])

    def get(self, name: str, default: Any = None) -> Any:
        found = self.functions.get(name, default)
        return None if found is None else reads_trees(found)

    def __contains__(self, name: str) -> bool:
        return name in self.functions


def _name_own(names: dict[str, Any]) -> None:
    """Add what reads trees to the names of a model's file, which may have got other functions since."""
    own = names.get(_OWN.format(_NAME))
    if own is None or own.functions is not names[_NAME]:
        names[_OWN.format(_NAME)] = _Functions(names[_NAME])
    eager, own = names.get(_EAGER), names.get(_OWN.format(_EAGER))
    if eager is not None and (own is None or own.args[0] is not eager):
        names[_OWN.format(_EAGER)] = reads_trees(eager)


def own_forward(module: nn.Module) -> tuple[str, types.FunctionType | None]:
    """Return the attribute that holds a module's forward, and its function; None where treefx has replaced it."""
    slot = UNWRAPPED if UNWRAPPED in module.__dict__ else "forward"
    forward = module.__dict__.get(slot, types.MethodType(type(module).forward, module))
    is_copy = hasattr(getattr(forward, "__func__", None), ORIGINAL)
    return slot, None if is_copy else _function_of(forward, module)


def put_forward(module: nn.Module, slot: str, made: types.FunctionType) -> None:
    """Set a forward that reads trees in the attribute that ``own_forward`` returned."""
    if slot not in module.__dict__:
        module.__dict__[_OF_CLASS] = True
    module.__dict__[slot] = types.MethodType(made, module)


def drop_stale_forwards(modules: Iterable[nn.Module]) -> None:
    """Remove copies of forwards of modules if their class, or its forward, has changed since."""
    for module in modules:
        if _OF_CLASS not in module.__dict__:
            continue
        original = original_of(module.__dict__.get("forward"))
        if original is not type(module).forward:
            del module.__dict__[_OF_CLASS]
            if original is not None:  # otherwise the user has set another forward
                del module.__dict__["forward"]


def mark_copy(made: Any, function: Any) -> Any:
    """Mark a forward that reads trees with the one that it stands for."""
    setattr(made, ORIGINAL, function)
    return made


def uninstall(module: nn.Module) -> None:
    """Give a module its own forward back."""
    drop_stale_forwards([module])
    module.__dict__.pop(_SCORES, None)
    module.__dict__.pop(_OF_CLASS, None)
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
    return getattr(getattr(forward, "__func__", None), ORIGINAL, None)


def _function_of(forward: Any, module: nn.Module) -> types.FunctionType:
    function = getattr(forward, "__func__", None)
    if not isinstance(function, types.FunctionType) or forward.__self__ is not module:
        raise UnsupportedError(_WRAPPED.format(type(module).__name__, type(forward).__name__))
    return function


@functools.lru_cache(maxsize=64)
def _reading(function: types.FunctionType) -> types.FunctionType:
    """Copy a forward with calls of ``treefx_get_interface`` in place of ``get_interface``, or with separate names."""
    code, cells = function.__code__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        other = {_GET: _GET_READING}
        if _GET not in code.co_names:
            other = {name: _OWN.format(name) for name in (_NAME, _EAGER) if name in function.__globals__}
        code = code.replace(co_names=tuple(other.get(name, name) for name in code.co_names))
    else:  # a decorator: the copy of the wrapped function replaces it in the wrapper's closure
        if not isinstance(inner, types.FunctionType) or not any(_contents(cell) is inner for cell in cells or ()):
            raise UnsupportedError(_WRAPPED.format(function.__qualname__, "decorated function"))
        cells = tuple(types.CellType(_reading(inner)) if _contents(cell) is inner else cell for cell in cells or ())
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__dict__.update(function.__dict__)
    made.__kwdefaults__, made.__doc__, made.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    made.__qualname__, made.__annotations__ = function.__qualname__, function.__annotations__
    return mark_copy(made, function)  # type: ignore[no-any-return]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never assigned
        return None


def _get_interface(functions: Any, name: Any, default: Any) -> Any:
    """``get_interface`` of the attentions of converted models."""
    return reads_trees(functions.get_interface(name, default))


def reads_trees(function: Callable[..., Any]) -> functools.partial[Any]:
    """Wrap an attention function to compute tree attention if its mask is a tree."""
    return functools.partial(_attention, function)


_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")
"""The first arguments of all attention functions of transformers; modules pass them by place or by name."""


def _attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute attention: query [B, H, T, D], key, value [B, Hkv, T, D] -> [B, T, H, D].

    Probabilities are the second result.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False))
    given.update(kwargs)
    if not is_tree(given.get("attention_mask"), given.get("query")):
        _check_rows(given.get("module"), given.get("attention_mask"), given.get("query"))
        return original(*args, **kwargs)
    if len(args) > len(_ARGUMENTS):  # their order differs from function to function
        names = list(inspect.signature(original).parameters)
        given.update(zip(names[len(_ARGUMENTS) :], args[len(_ARGUMENTS) :], strict=False))
    first = [given.pop(name) for name in _ARGUMENTS]
    return attend_on_tree(*first, **given), None


class _Running(threading.local):
    has_tree = False


_running = _Running()


def expect_trees(has_tree: bool) -> None:
    """Say whether attentions that this thread calls from now on are to get a tree."""
    _running.has_tree = has_tree


def running_on_tree() -> bool:
    """Return whether attentions that this thread calls now are to get a tree."""
    return _running.has_tree


def _check_rows(module: Any, mask: Any, query: Any) -> None:
    """Raise if a call should have a tree: its mask was derived from one.

    A mask made of a tree has several entries in front for one row of queries. Compiled code is not asked for more.
    """
    changed = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[0] > 1 and query.shape[0] == 1
    if not changed and not torch.compiler.is_compiling():
        changed = _running.has_tree and _SCORES in module.__dict__
    if changed:
        raise UnsupportedError(_CHANGED.format(type(module).__name__))


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
    """Compute tree attention by the scores of the module.

    Arguments are those of transformers' attention functions.

    Returns:
        [1, N, H, D] in the dtype of the query.

    Raises:
        UnsupportedError: The call differs from the proved score of the module.
    """
    stated: Stated | None = getattr(module, _SCORES, {}).get(tree.shape[0])
    if stated is None:
        raise UnsupportedError(_UNPROVED.format(type(module).__name__))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = float(scale), softcap, s_aux is not None
    if dropout or is_causal is False or not _agree(*asked, stated):
        wanted = stated.scale, stated.softcap, stated.has_sinks
        raise UnsupportedError(_OTHER.format(type(module).__name__, *asked, dropout, *wanted))
    if stated.asks_of_heads and query.shape[1] != stated.heads:
        raise UnsupportedError(_HEADS.format(type(module).__name__, stated.heads, query.shape[1]))
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    sinks = None if s_aux is None else s_aux.to(wide)
    buffers = [read.of(tree) for read in stated.reads]
    out = attend(query.to(wide), key.to(wide), value.to(wide), tree[0, 0, 0], stated.score, buffers, sinks)
    return out.to(query.dtype).transpose(1, 2).contiguous()


_WRAPPED = (
    "treefx.convert replaces the forward of attention modules by a copy that reads trees, and the forward of {} is a "
    "{} that hides the function"
)
_UNPROVED = (
    "under treefx.convert every attention that gets a tree must be proved first, but {} was not; call treefx.convert "
    "after the model has got all its modules"
)
_CHANGED = (
    "under treefx.convert an attention gets a tree in place of its mask, and {} changes or replaces it before it "
    "calls its attention function. Change masks in the code around the blocks, or call treefx.unconvert(model)"
)
_HEADS = (
    "under treefx.convert the scores of {} differ from head to head and were proved for {} query heads, but it attends "
    "with {}, as under tensor parallelism: which of the heads these are is not known. Call treefx.unconvert(model)"
)
_OTHER = (
    "under treefx.convert an attention must keep its proved score, but {} is called with scale {}, softcap {}, sinks "
    "{} and dropout {}, and scale {}, softcap {}, sinks {} were proved; convert the model again after its "
    'attention was changed, or load it with attn_implementation="eager" where the attention of the proof leaves '
    "an option out (SDPA a soft cap)"
)


def _agree(scale: float, softcap: float | None, has_sinks: bool, stated: Stated) -> bool:
    close = abs(scale - stated.scale) <= 1e-6 * abs(stated.scale)
    return close and softcap == stated.softcap and has_sinks == stated.has_sinks
