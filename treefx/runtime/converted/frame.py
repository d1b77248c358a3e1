"""Test the code around the blocks: inputs on the packed row must equal those on rows.

Blocks are proved by their graph (``sizes``); the code between them and the ids (embedding, positions, masks) decides
from shapes and arguments in Python, and runs here on a few made-up rows with blocks that only record their inputs. It
shows that positions left out are those of columns, that positions passed are the ones used, and that the tree reaches
every block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from treefx.errors import UnsupportedError
from treefx.runtime.converted.readers import Attributes, replaced
from treefx.runtime.converted.seam import tree_of

__all__ = ["blocks_of", "cache_matters", "check_frame", "kinds_of_layers", "packed_inputs", "run_around"]

_ROWS = [[0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 5, 6], [0, 0, 1, 2, 5, 7]]
_PADDING = 2
_END = [7, 7, 4, 4, 7, 6, 7]
"""The tree of the rows without padding: 1 2, below it 3 4 and 5, below that 6 and 7."""
_ROW, _COLUMN = [0, 0, 0, 0, 1, 1, 2], [2, 3, 4, 5, 4, 5, 5]
_NUMBERED = {(len(_ROWS[0]), len(_ROW)), (len(_ROWS[0]), len(_ROW) + _PADDING)}
"""Lengths of a vector with an entry per column, on rows and on the packed row."""
_WEIGHTS = 16
"""Rows of tables that ids and positions of the made-up rows can read."""


def packed_inputs(
    given: Mapping[str, Any], ids: Tensor, positions: Tensor, tree: Tensor, kinds: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments of the module that takes the ids, for the packed row.

    Ids and positions are [N]. The mask is the tree, or a dictionary of it for all ``kinds`` of layers.
    """
    mask = dict.fromkeys(kinds, tree) if kinds else tree
    changed = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": mask, "use_cache": False}
    return {**given, **changed}


def kinds_of_layers(owner: nn.Module) -> tuple[str, ...]:
    """Return the keys of masks that a model with several kinds of mixers takes; none for other models.

    transformers makes no mask for a recurrence out of one of four dimensions, but takes one that is given by kind.
    """
    config = getattr(owner, "config", None)
    found = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    return tuple(sorted(found | _KINDS)) if found - _ATTENTIONS else ()


_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
_KINDS = {"full_attention", "linear_attention", "conv"}
"""Kinds of masks, which are not always those of layers."""


def blocks_of(model: nn.Module, attention: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the blocks: all entries of the module lists with attentions.

    Raises:
        UnsupportedError: An attention stands in no list.
    """
    found = set()
    for name in attention:
        parts = name.split(".")
        prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        parents = [model.get_submodule(".".join(parts[: i - 1])) for i in range(1, len(parts) + 1)]
        listed = [p for p, q in zip(prefixes, parents, strict=True) if isinstance(q, nn.ModuleList | nn.ModuleDict)]
        if not listed:
            raise UnsupportedError(f"the attention {name} stands in no list of blocks (nn.ModuleList)")
        found.add(listed[0].rpartition(".")[0])
    return {f"{name}.{entry}" if name else entry for name in found for entry, _ in _entries(model, name)}


def _entries(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    return model.get_submodule(name).named_children()


_FAILS = "the code around the blocks fails on a tree: {}: {}"


def check_frame(
    owner: nn.Module,
    blocks: set[str],
    given: Mapping[str, Any],
    *,
    readers: Collection[str],
    kinds: Sequence[str] = (),
) -> None:
    """Run a skeleton on made-up rows and on their packed row; compare blocks and results.

    Args:
        owner: A skeleton of the module that takes the ids; its weights are undefined, and some are overwritten.
        blocks: Names of its blocks.
        given: The arguments of a call, on the CPU; of its tensors only which are there counts.
        readers: Names of the modules that the tree must reach: those of a block mean the block.
        kinds: Of layers, as ``packed_inputs`` takes them.

    Raises:
        UnsupportedError: They differ, or the code cannot be run.
    """
    rows, packed, tree = _calls(given, kinds)
    reading = {block for block in blocks for name in readers if name == block or name.startswith(f"{block}.")}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in owner.named_parameters():
            if not any(name.startswith(f"{block}.") for block in blocks):
                parameter.data[:_WEIGHTS].normal_()
        found = [_compare(owner, blocks, reading, rows, packed, tree, _RESULTS[0])]
        for result in _RESULTS[1:]:
            if found[-1] is not None:
                found.append(_compare(owner, blocks, reading, rows, packed, tree, result))
    if found[-1] is not None:
        raise UnsupportedError(str(found[0]))


_RESULTS: tuple[Callable[[Tensor], Any], ...] = (lambda x: x, lambda x: (x, None), lambda x: (x,))
"""What blocks of transformers return, by their hidden states."""


def _compare(
    owner: nn.Module, blocks: set[str], reading: set[str], rows: dict[str, Any], packed: dict[str, Any], tree: Tensor,
    result: Callable[[Tensor], Any],
) -> str | None:  # fmt: skip
    """Say how the packed row differs from rows, where blocks return a ``result``; None if it does not."""
    try:
        expected, got = _noted(owner, blocks, rows, result), _noted(owner, blocks, packed, result)
    except Exception as error:
        return _FAILS.format(type(error).__name__, next(iter(str(error).splitlines()), ""))
    if len(expected) != len(got) or not expected:
        return "the packed row runs other blocks than rows do"
    for (name, *on_rows), (again, *on_tree) in zip(expected, got, strict=True):
        must = True if name in reading else None if name in blocks else False
        if name != again or not _agree(on_rows, on_tree, tree, rows["attention_mask"], must):
            return f"on the packed row {name or 'a block'} gets other values than on rows"
    return None


def run_around(owner: nn.Module, blocks: set[str], given: Mapping[str, Any]) -> None:
    """Run the code around the blocks on the made-up rows; arguments are those of ``check_frame``."""
    rows = _calls(given, ())[0]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for result in _RESULTS:
            try:
                _noted(owner, blocks, rows, result)
            except Exception:  # noqa: S112 - blocks may return something else
                continue
            return


def _calls(given: Mapping[str, Any], kinds: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """The arguments for the made-up rows and for their packed row, and its tree."""
    ids = torch.tensor(_ROWS)
    masked, placed = given.get("attention_mask") is not None, given.get("position_ids") is not None
    ids = ids if masked else torch.where(ids == 0, torch.tensor([[9, 8, 0, 0, 0, 0]]), ids)
    row, column, end = (torch.tensor(x) for x in (_ROW, _COLUMN, _END))
    if not masked:  # former padding stands before the tree
        first = torch.arange(_PADDING)
        row, column = torch.cat([first * 0, row]), torch.cat([first, column])
        end = torch.cat([first * 0 + len(row), end + _PADDING])
    positions = (torch.arange(ids.shape[1]) - _PADDING).clamp(min=0).expand_as(ids) if placed else None
    mask = (ids != 0).to(torch.int64) if masked else None
    on_rows = {**given, "input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    tree = tree_of(end.to(torch.int32), [column.to(torch.int32)])
    place = column if positions is None else positions[row, column]
    return on_rows, packed_inputs(given, ids[row, column], place, tree, kinds), tree


def _noted(
    owner: nn.Module, blocks: set[str], inputs: Mapping[str, Any], result: Callable[[Tensor], Any] = _RESULTS[0]
) -> list[tuple[Any, ...]]:
    """Record the inputs of each block, those of linear layers between blocks, and the owner's results.

    Blocks return a ``result`` of the hidden states they get; linear layers return their first feature, as many times
    as they have features: a product would round otherwise on another number of tokens.
    """
    notes: list[tuple[Any, ...]] = []

    def noting(name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            notes.append((name, args, kwargs))
            return result(args[0] if args else kwargs["hidden_states"])

        return forward

    def noting_features(name: str, features: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            notes.append((name, (x,), {}))
            return x[..., :1].expand(*x.shape[:-1], features)

        return forward

    attributes = Attributes(owner)
    try:
        with ExitStack() as stack:
            for name in blocks:
                stack.enter_context(replaced(owner.get_submodule(name), noting(name)))
            for name, linear in _linears(owner, blocks):
                stack.enter_context(replaced(linear, noting_features(name, linear.out_features)))
            notes.append(("output", (), dict(owner(**inputs))))
    finally:
        attributes.restore()  # the copy has lists and dictionaries in common with its original
    return notes


def _linears(owner: nn.Module, blocks: set[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers outside of blocks that run PyTorch's own code."""
    for name, module in owner.named_modules():
        is_own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if is_own and "forward" not in module.__dict__ and not any(name.startswith(f"{block}.") for block in blocks):
            yield name, module


def cache_matters(owner: nn.Module, blocks: set[str], given: Mapping[str, Any]) -> bool:
    """Whether blocks get other tensors of a packed row with a cache than without one.

    transformers looks for positions that restart, and keeps the sequences of a packed row apart in its masks, only
    where there is no cache.

    Args:
        owner: A skeleton of the module that takes the ids.
        blocks: Names of its blocks.
        given: The arguments of a call without a mask; of its tensors only which are there counts.

    Raises:
        UnsupportedError: The code around the blocks cannot be run.
    """
    row = {**given, "input_ids": torch.tensor([[3, 4, 5, 3, 4, 6]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            plain, cached = (_noted(owner, blocks, {**row, "use_cache": use}) for use in (False, True))
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(_FAILS.format(type(error).__name__, first)) from error
    ours, others = ([_masks(note) for note in notes if note[0] != "output"] for notes in (plain, cached))
    return ours != others


def _masks(note: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of a block that may be masks: no hidden states, no rotations.

    No BlockMask equals another.
    """
    leaves = tree_flatten(note[1:], is_leaf=lambda x: type(x).__name__ == "BlockMask")[0]
    tensors = [x.tolist() for x in leaves if isinstance(x, Tensor) and x.dim() == 4]
    return tensors + [object() for x in leaves if type(x).__name__ == "BlockMask"]


def _agree(on_rows: list[Any], on_tree: list[Any], tree: Tensor, mask: Any, must: bool | None) -> bool:
    """Return whether a block's inputs on the packed row equal those on rows.

    Masks are replaced by the tree: those of attention, and the caller's own. ``must`` says whether there must be one,
    or none; None says that there may.
    """
    expected, shape = tree_flatten(on_rows)
    got, other = tree_flatten(on_tree)
    trees = [x is tree or (isinstance(x, Tensor) and x.dtype == tree.dtype and torch.equal(x, tree)) for x in got]
    values = zip(expected, got, trees, strict=False)
    agree = all(_is_mask(x, mask) if is_tree else _same(x, y) for x, y, is_tree in values)
    return shape == other and (must is None or any(trees) is must) and agree


def _is_mask(x: Any, mask: Any) -> bool:
    """Whether a tree may stand for a value; one [B, T] must be the caller's mask."""
    return not isinstance(x, Tensor) or x.dim() != 2 or (isinstance(mask, Tensor) and torch.equal(x, mask))


def _same(x: Any, y: Any) -> bool:
    """Whether a value of the packed row is that of rows, token by token."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x is y or bool(x == y)
    if x.dim() == y.dim() == 1 and (len(x), len(y)) in _NUMBERED:
        return x.dtype == y.dtype  # as cache_position, which blocks get and do not read (``sizes``)
    if x.dim() >= 2 and x.dim() == y.dim() and x.shape[1] == len(_ROWS[0]) and y.shape[0] == 1:
        padded = y.shape[1] == len(_ROW)
        first = [] if padded else list(range(_PADDING))
        row, column = torch.tensor([0] * len(first) + _ROW), torch.tensor(first + _COLUMN)
        x = x.expand(len(_ROWS), *x.shape[1:])[row, column][None]
    return x.shape == y.shape and x.dtype == y.dtype and bool(torch.allclose(x, y, rtol=1e-6, atol=0, equal_nan=True))
