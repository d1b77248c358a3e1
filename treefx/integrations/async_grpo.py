"""TRL's AsyncGRPO: its trees run on treefx's attention, on any device.

Written for TRL 1.16, whose ``AsyncGRPOTrainer`` folds the samples of a rank in a tree (``packing.TreeRow``) and calls
its model on the distinct tokens. Its own attention, registered as ``tree_fa3``, gathers keys and values of every path
from the root for FlashAttention 3, which runs on few GPUs and knows no sinks. Here the same name stands for
``treefx.kernels.tree_attention``, which copies nothing. The tree follows from TRL's bounds of segments and paths; it
is found once per call, for all layers.

Before it is trained, a model runs on a small tree, and with its own attention on the rows of it: where results differ
(recurrences, attention that reads more than the tree), it is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

from treefx.errors import InputError, UnsupportedError
from treefx.kernels import tree_attention
from treefx.reason_codes import with_code
from treefx.refusal_codes import TRAINER

__all__ = ["attend_along_trees", "check_models", "install"]

_PACKING, _TRAINER = (f"trl.experimental.async_grpo.{name}" for name in ("packing", "async_grpo_trainer"))
_READ = {"position_ids", "cache_position", "tree_kv_index", "labels", "shift_labels", "input_ids"}
"""Tensors that models hand to attention which change nothing that it computes."""
_LAYERS = {"full_attention", "sliding_attention"}
_PREFIX, _BRANCHES = 6, (5, 7)
"""Tokens of the small tree."""
_TOLERANCE, _SIXTEEN_BITS_TOLERANCE = 1e-3, 0.05
"""Relative error of the median token: experts that a rounding swaps change few of them, a wrong tree nearly all."""


def install() -> None:
    """Hook TRL's AsyncGRPO in this process, once; before its trainer is built.

    ``treefx run -- COMMAND`` does the same.

    Example:
        >>> import treefx.integrations.async_grpo
        >>> treefx.integrations.async_grpo.install()  # doctest: +SKIP
        >>> trainer = AsyncGRPOTrainer("openai/gpt-oss-20b", rewards, train_dataset=prompts)  # doctest: +SKIP
    """
    attend_along_trees(import_module(_PACKING))
    check_models(import_module(_TRAINER))


def attend_along_trees(packing: Any) -> None:
    """Register treefx's attention in place of TRL's.

    Args:
        packing: the module ``trl.experimental.async_grpo.packing``.
    """
    packing.tree_attention = attention  # what `register_tree_attention` registers
    AttentionInterface.register(packing.TREE_ATTENTION, attention)


def check_models(trainer: Any) -> None:
    """Check every model that the trainer builds.

    Those with sinks pass TRL's own check, a CPU is a device, and treefx, which finds trees in rows, compiles nothing.

    Args:
        trainer: the module ``trl.experimental.async_grpo.async_grpo_trainer``.
    """
    create = trainer.create_model_from_path
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_model_from_path(*args: Any, **kwargs: Any) -> Any:
        model = create(*args, **kwargs)
        _check(model, trainer.TREE_ATTENTION)
        _hide_sinks_once(model)
        return model

    peak_flops = trainer.get_peak_flops_per_device

    @functools.wraps(peak_flops)
    def get_peak_flops_per_device(accelerator: Any, *args: Any) -> Any:
        # It reads the name that CUDA has for a device.
        return peak_flops(accelerator, *args) if accelerator.device.type == "cuda" else None

    make = trainer.AsyncGRPOTrainer.create_accelerator_and_postprocess

    @functools.wraps(make)
    def create_accelerator_and_postprocess(self: Any) -> None:
        make(self)
        _leave_uncompiled(self.accelerator)

    trainer.AsyncGRPOTrainer.create_accelerator_and_postprocess = create_accelerator_and_postprocess
    trainer.create_model_from_path = create_model_from_path
    trainer.get_peak_flops_per_device = get_peak_flops_per_device


def _leave_uncompiled(accelerator: Any) -> None:
    """Do not compile with treefx, which finds trees in rows; other backends stay."""
    plugin = accelerator.state.dynamo_plugin

    def without_treefx(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_uncompiled(*args: Any, **kwargs: Any) -> Any:
            backend = plugin.backend
            if backend.value == "TREEFX":
                plugin.backend = type(backend).NO
            try:
                return prepare(*args, **kwargs)
            finally:
                plugin.backend = backend

        return prepare_uncompiled

    accelerator.prepare = without_treefx(accelerator.prepare)
    accelerator.prepare_model = without_treefx(accelerator.prepare_model)


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tree:
    """A packed tree.

    Attributes:
        subtree_end: int32 ``[N]``.
        depth: int32 ``[N]``.
        paths: the bounds that it was made of, besides those of segments.
        versions: what both were when it was made.
    """

    subtree_end: Tensor
    depth: Tensor
    paths: weakref.ref[Tensor]
    versions: list[int]


_trees = WeakTensorKeyDictionary()
"""The tree of each call, by its bounds of segments, which all of its layers get."""


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tree_cu_seqlens_q: Tensor | None = None,
    tree_cu_seqlens_k: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend along a tree of TRL's, as transformers calls attention.

    Args:
        module: the layer's attention.
        query: ``[1, H, N, D]``.
        key: ``[1, Hkv, N, D]``.
        value: ``[1, Hkv, N, Dv]``.
        attention_mask: none: the tree is the mask.
        tree_cu_seqlens_q: bounds of the segments in the packed row, ``[S + 1]``.
        tree_cu_seqlens_k: sums of the lengths of their paths from the root, ``[S + 1]``.
        scaling: factor of the product.
        dropout: 0.
        sliding_window: tokens of a path that are seen.
        softcap: bound of the logit.
        s_aux: sinks ``[H]``.
        is_causal: not False.
        others: what else the model hands to attention; no tensor of a meaning unknown here.

    Raises:
        InputError: there is no tree, or it is none.
        UnsupportedError: attention depends on more than the tree, by name.
    """
    if tree_cu_seqlens_q is None or tree_cu_seqlens_k is None:
        raise InputError(
            "AsyncGRPO's attention expects the tree of a training step (tree_cu_seqlens_q and tree_cu_seqlens_k), got "
            'none; for other calls: model.set_attn_implementation("sdpa")'
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_more(
        {"an attention mask": attention_mask is not None, _DROPOUT: bool(dropout), _BOTH: not is_causal}, others
    )
    tree = _tree_of(tree_cu_seqlens_q, tree_cu_seqlens_k)
    if query.shape[0] != 1 or query.shape[2] != len(tree.depth):
        raise InputError(f"a tree of {len(tree.depth)} tokens expects queries [1, H, N, D], got {list(query.shape)}")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    out = tree_attention(
        query, key, value, tree.subtree_end, tree.depth,
        scale=scaling, window=sliding_window or None, softcap=softcap or None, sinks=s_aux,
    )  # fmt: skip
    return out.transpose(1, 2), None


_DROPOUT, _BOTH = "dropout, set attention_dropout=0", "attention that is not causal"


def _refuse_more(asked: dict[str, bool], others: dict[str, Any]) -> None:
    """Refuse what the tree does not say, by name."""
    unknown = [name for name, item in others.items() if isinstance(item, Tensor) and name not in _READ]
    found = [name for name, is_asked in asked.items() if is_asked] + unknown
    if found:
        raise _refusal(f"attention by the tree alone, got {found[0]}")


def _tree_of(segments: Tensor, paths: Tensor) -> _Tree:
    """Return the tree of a call, found once for all of its layers."""
    versions = [-1 if x.is_inference() else x._version for x in (segments, paths)]
    known: _Tree | None = _trees.get(segments)  # type: ignore[no-untyped-call]
    if known is None or known.paths() is not paths or known.versions != versions:
        starts, stops, firsts, ends = _find_tree(segments.tolist(), paths.tolist())
        own = [stop - start for start, stop in zip(starts, stops, strict=True)]
        columns = torch.tensor([own, ends, [first - start for first, start in zip(firsts, starts, strict=True)]])
        end, offset = columns[1:].repeat_interleave(columns[0], dim=1)
        tokens = torch.stack([end, offset + torch.arange(stops[-1])]).to(segments.device, torch.int32)
        known = _Tree(tokens[0], tokens[1], weakref.ref(paths), versions)
        _trees[segments] = known
    return known


def _find_tree(segments: Sequence[int], paths: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return each segment's first token, the one after its last, the depth of its first, and the end of its subtree.

    Raises:
        InputError: they are not the bounds of a tree in depth-first order.
    """
    starts, stops = list(segments[:-1]), list(segments[1:])
    lengths = [stop - start for start, stop in zip(paths[:-1], paths[1:], strict=True)]
    firsts: list[int] = []
    ends = [stops[-1] if stops else 0] * len(starts)
    above: list[int] = []
    for number, (start, stop, length) in enumerate(zip(starts, stops, lengths, strict=True)):
        first = length - (stop - start)
        while above and firsts[above[-1]] >= first:
            ends[above.pop()] = start
        hangs_on = firsts[above[-1]] + stops[above[-1]] - starts[above[-1]] if above else 0
        if stop <= start or first != hangs_on:
            raise InputError(
                "TRL's tree should have segments in depth-first order, each behind one that ends above it, got segment "
                f"{number} of tokens {start} to {stop} at depth {first}, expected {hangs_on}"
            )
        firsts.append(first)
        above.append(number)
    return starts, stops, firsts, ends


def _refusal(text: str) -> UnsupportedError:
    return UnsupportedError(with_code(f"treefx expects {text}; {_WAY_OUT}", TRAINER))


_WAY_OUT = "train it with GRPOTrainer under treefx run, which shares the rows of a group"


# Models ---------------------------------------------------------------------------------------------------------------


def _check(model: Any, name: str) -> None:
    """Refuse a model whose results on a small tree differ from those on the rows.

    Raises:
        UnsupportedError: it has layers that are no attention, or the results differ.
    """
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or []) - _LAYERS
    if layers:
        raise _refusal(f"layers of attention, got {', '.join(sorted(layers))}, which would run across branches")
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # another rank has the weights
    try:
        error = tree_error(model, name)
    except Exception as failure:
        text = f"a model that runs on a tree, got {type(model).__name__}, which failed on a small one ({failure})"
        raise _refusal(text) from failure
    if not error <= (_TOLERANCE if model.dtype.itemsize > 2 else _SIXTEEN_BITS_TOLERANCE):
        raise _refusal(
            f"a model that computes by positions and attention alone, got {type(model).__name__}, whose results on a "
            f"tree differ by {error:.1g} from those on its rows"
        )


@torch.no_grad()
def tree_error(model: Any, name: str) -> float:
    """Run a small tree, and its last row with the model's own attention.

    Args:
        model: in a mode without dropout.
        name: of the attention that reads the tree.

    Returns:
        The median over tokens of the last branch of the relative error of a token's logits.
    """
    count, device = _PREFIX + sum(_BRANCHES), model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(count, device=device) * 7919 + 13) % vocabulary
    depth = torch.tensor([*range(_PREFIX), *(_PREFIX + i for n in _BRANCHES for i in range(n))], device=device)
    stops = [_PREFIX + sum(_BRANCHES[:i]) for i in range(len(_BRANCHES) + 1)]
    branches = zip(stops, stops[1:], strict=False)
    rows = [torch.tensor([*range(_PREFIX), *range(*branch)], device=device) for branch in branches]
    paths = torch.cat([torch.arange(_PREFIX, device=device), *rows])
    tree = {
        "tree_kv_index": paths,
        "tree_cu_seqlens_q": torch.tensor([0, *stops], dtype=torch.int32, device=device),
        "tree_cu_seqlens_k": torch.tensor([0, _PREFIX, *map(len, rows)], device=device).cumsum(0).to(torch.int32),
        "tree_max_seqlen_q": max(_PREFIX, *_BRANCHES),
        "tree_max_seqlen_k": _PREFIX + max(_BRANCHES),
    }
    row, training = rows[-1], model.training
    model.eval()
    try:
        got = model(input_ids=ids[None], position_ids=depth[None], use_cache=False, **tree).logits[0, row]
        model.set_attn_implementation("eager")
        wanted = model(input_ids=ids[row][None], position_ids=depth[row][None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(name)
        model.train(training)
    got, wanted = (x[_PREFIX:].float() for x in (got, wanted))  # those that have other branches before them
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)).median())


class _SinkName(str):
    """A parameter's name which does not end as TRL's check expects of sinks."""

    __slots__ = ()

    def endswith(self, *args: Any) -> bool:
        return args != (".sinks",) and super().endswith(*args)


def _hide_sinks_once(model: Any) -> None:
    """Let the model pass TRL's check, the next reading of its parameters' names; all of them stay there."""

    def named_parameters(*args: Any, **kwargs: Any) -> Any:
        del model.named_parameters
        return ((_SinkName(name), parameter) for name, parameter in model.named_parameters(*args, **kwargs))

    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        model.named_parameters = named_parameters
