"""Mistakes to be planted: each makes one law of the sources wrong, as a hand that forgets something would.

A plant replaces attributes of modules by name; ``planted`` fails if one is not there any more, so that a renamed
function cannot leave a plant without effect.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import treefx
from treefx.forests import context
from treefx.passes import pipeline as _pipeline  # noqa: F401  (registers all laws)
from treefx.passes.trace.heads import copy_graph
from treefx.runtime import call_plan

__all__ = ["PLANTS", "Plant", "planted"]

aten = torch.ops.aten
Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Plant:
    """A mistake, and the family of programs that aims where it is."""

    says: str
    family: str
    changes: dict[str, Change]
    """By "module:attribute": what the attribute becomes, from what it is."""
    inner: str = "eager"
    """What compiles the programs: with eager some mistakes do not matter."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """The sources with the mistake in them."""
    kept = []
    try:
        for place, change in plant.changes.items():
            owner, name = _find(place)
            original = getattr(owner, name)
            kept.append((owner, name, original))
            setattr(owner, name, change(original))
        yield
    finally:
        for owner, name, original in reversed(kept):
            setattr(owner, name, original)
        call_plan._recent.clear()  # tries that the mistake has made would be found again by what comes after it


def _find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    assert hasattr(owner, name), f"{place} is not in the sources any more: plant the mistake where that went"
    return owner, name


# The mistakes ---------------------------------------------------------------------------------------------------------


def _wider_window(canonical_window: Change) -> Change:
    def wrong(condition: Any, tables: Any) -> Any:
        found = canonical_window(condition, tables)
        is_window = found[0] == "lt" and found[1] == ("sub", ("cq",), ("ck",)) and found[2][0] == "const"
        return (*found[:2], ("const", found[2][1] + 1)) if is_window else found

    return wrong


def _columns_off_by_one(tensors: Change) -> Change:
    def wrong(row: Any, column: Any, *rest: Any) -> Any:
        return tensors(row, (column - 1).clip(0), *rest)

    return wrong


def _ids_alone(combine_keys: Change) -> Change:
    return lambda columns: combine_keys(columns[:1])


def _last_rows_lost(restore: Change) -> Change:
    def wrong(grad: Any, token_of: Any, *rest: Any) -> Any:
        half = len(token_of) // 2
        return restore(grad, torch.cat([token_of[:half], torch.full_like(token_of[half:], -1)]), *rest)

    return wrong


def _one_ignored_index(pick: Change) -> Change:
    return lambda ignored: pick(None if ignored is None else -100)


def _laws_of_noise(laws: dict[Any, Any]) -> dict[Any, Any]:
    pointwise = laws[aten.clone.default, None]
    drawn = (aten.randn_like.default, aten.rand_like.default, aten.bernoulli.p, aten.bernoulli.default)
    return laws | dict.fromkeys([(target, None) for target in drawn], pointwise)


def _always(answer: Any) -> Change:
    def change(function: Any) -> Any:
        @functools.wraps(function)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            return answer

        return wrong

    return change


def _forgetful(cached: Any) -> Any:
    """What it answers without the mistake is not remembered with it, nor the other way around."""
    return cached.__wrapped__


def _same_shapes(same: Change) -> Any:
    def wrong(left: Any, right: Any) -> bool:
        return len(left) == len(right) and all(a.shape == b.shape for a, b in zip(left, right, strict=True))

    return wrong


def _heads_outside(heads_inside: Change) -> Change:
    return lambda x: x.contiguous()


def _nothing_asked(redundant: Any) -> Any:
    def wrong(padding: Any, *args: Any, **kwargs: Any) -> Any:
        return frozenset(item for attention in padding._analysis.attentions for item in attention.conditions)

    return wrong


def _leaves_alone(strided_fake: Change) -> Any:
    """The fake of a result is a leaf: no view of one."""

    def wrong(x: Any, *args: Any) -> Any:
        return strided_fake(x.detach().requires_grad_(x.requires_grad), *args)

    return wrong


def _labels_below_zero_ignored(entries: Change) -> Any:
    return lambda target, size, ignore_index: target.clamp(min=-1)


def _outputs_alone(leaks: Change) -> Any:
    """A value that reaches a changed buffer alone counts as unread."""
    return lambda node, live: leaks(node, {item for item in live if item.target is not aten.copy_.default})


def _part_by_part(backward: Change) -> Any:
    """Every part of a plan runs the hooks of leaves, on its own share of the gradient."""

    def wrong(gradients: Any, roots: Any, given: Any, own: Any = ()) -> Any:
        torch.autograd.backward(roots, given)
        return [leaf.grad for leaf in own]

    return wrong


PLANTS = {
    "window": Plant(
        "a window of w keys admits w + 1",
        "masks",
        {"treefx.passes.scores.attention_facts:canonical_window": _wider_window},
    ),
    "columns": Plant(
        "tokens are read one column too early", "embeddings", {"treefx.runtime.call_plan:_tensors": _columns_off_by_one}
    ),
    "keys": Plant(
        "the first input alone distinguishes tokens, not the others",
        "inputs",
        {"treefx.runtime.call_plan:combine_keys": _ids_alone},
    ),
    "restoration": Plant(
        "the gradients of the last rows are lost where rows are summed",
        "losses",
        {"treefx.kernels.expand:restore_pick": _last_rows_lost},
    ),
    "ignored index": Plant(
        "every loss ignores -100, whatever it says",
        "losses",
        {"treefx.passes.labels.laws.losses:Pick": _one_ignored_index},
    ),
    "purity": Plant(
        "noise is drawn once per distinct token",
        "random",
        {
            "treefx.passes.labels.laws.base:_LAWS": _laws_of_noise,
            "treefx.passes.labels.label_tokens:draws": _always(False),
        },
    ),
    "read": Plant(
        "no loss reads what padding computes",
        "losses",
        {"treefx.runtime.padding:Padding.read": lambda read: _nothing_read},
    ),
    "proof": Plant("a proof outlives its buffers", "buffers", {"treefx.runtime.shapes:Proof.holds": _always(True)}),
    "trie": Plant(
        "the trie of a call is remembered by its shape", "calls", {"treefx.runtime.call_plan:_same": _same_shapes}
    ),
    "stride": Plant(
        "tree attention returns its heads outside, and promises them inside",
        "attention",
        {"treefx.kernels.ops:heads_inside": _heads_outside},
        "aot_eager",
    ),
    "mode": Plant(
        "what was compiled without gradients is used for training",
        "outputs",
        {"treefx.runtime.shapes:process_state": _always(())},
        "aot_eager",
    ),
    "linearity": Plant(
        "every backward of an autograd.Function is taken for linear",
        "autograd",
        {
            "treefx.passes.labels.laws.gradients:_is_linear": _always(True),
            "treefx.passes.labels.laws.pointwise:custom_function_reason": _forgetful,
            "treefx.passes.causal.elements:custom_function_reason": _forgetful,
        },
    ),
    "condition": Plant(
        "conditions of an attention are dropped unasked",
        "masks",
        {"treefx.runtime.padding:Padding.redundant": _nothing_asked},
    ),
    "leaf": Plant(
        "every input that a graph changes in place is taken for a leaf",
        "inplace",
        {"treefx.runtime.ways.free_sizes:strided_fake": _leaves_alone},
        "aot_eager",
    ),
    "not finite": Plant(
        "every product of masked pairs is taken for finite",
        "nonfinite",
        {
            "treefx.kernels.cpu.attention:are_finite": _always(True),
            "treefx.kernels.cpu.one_call:are_finite": _always(True),
            "treefx.kernels.masked_products:are_finite": _always(True),
        },
    ),
    "weight of zero": Plant(
        "a token of weight 0 is multiplied by its weight, not left out",
        "weights",
        {"treefx.losses.supervised:counted": lambda counted: lambda values, counts: values},
    ),
    "labels": Plant(
        "a label below zero is taken for the ignored one",
        "invalid",
        {"treefx.passes.packing.emit_losses:entries": _labels_below_zero_ignored},
    ),
    "lookups": Plant(
        "ids of dropped padding are not compared with the size of their table",
        "invalid",
        {"treefx.runtime.padding:Padding.check_lookups": _always(None)},
    ),
    "lookups of converted models": Plant(
        "ids of padding that a converted model leaves out are not compared with the size of their table",
        "converted",
        {"treefx.runtime.padding:Padding.check_lookups": _always(None)},
    ),
    "counters": Plant(
        "padding that only a changed buffer reads is dropped",
        "counters",
        {"treefx.passes.pipeline:leaks": _outputs_alone},
    ),
    "counters of forests": Plant(
        "a buffer may count the tokens of a forest, which are there once",
        "counters",
        {"treefx.runtime.ways.native:changed_by": _always(None)},
    ),
    "hooks": Plant(
        "gradient hooks run for each part of a plan",
        "hooks",
        {
            "treefx.planning.execution.gradients:Gradients.backward": _part_by_part,
            "treefx.planning.execution.backward:weights_unchanged": _always(contextlib.nullcontext()),
        },
        "aot_eager",
    ),
    "put back": Plant(
        "a fault while a plan adds its gradients leaves some of them added",
        "faults",
        {"treefx.planning.execution.gradients:Gradients.put_back": _always(None)},
        "aot_eager",
    ),
    "kept": Plant(
        "values that a converted model keeps are handed out packed",
        "converted",
        {"treefx.runtime.converted.planner:kept_values": lambda kept_values: lambda root: []},
    ),
    "forward hook": Plant(
        "forward hooks inside of a converted model get packed values",
        "converted",
        {"treefx.runtime.converted.planner:find_hook": _always(None)},
    ),
    "cache": Plant(
        "a converted model keeps the sequences of a packed row apart where its cache lets them meet",
        "converted",
        {"treefx.runtime.converted.hooks:Hooks._mixes_sequences": _always(False)},
    ),
    "not compiled": Plant(
        "a forest is taken for used by a model that is not compiled",
        "weights",
        {"treefx:use": lambda use: _unchecked, "treefx.logprobs:check_run": _always(None)},
    ),
    "no sum": Plant(
        "every loss is taken for a sum over the parts of a plan",
        "hooks",
        {"treefx.planning.execution.additive:SumCheck._check": _always(None)},
        "aot_eager",
    ),
    "numbers": Plant(
        "calls that are not packed do not know the floats of the model, which dynamic=True makes inputs",
        "modes",
        {"treefx.runtime.ways.ordinary:with_numbers": lambda with_numbers: _no_numbers},
        "aot_eager",
    ),
}


@contextmanager
def _unchecked(forest: treefx.Forest) -> Iterator[treefx.Forest]:
    token = context.IN_USE.set(context._Use(forest))
    try:
        yield forest
    finally:
        context.IN_USE.reset(token)


def _no_numbers(gm: torch.fx.GraphModule, numbers: dict[int, float]) -> torch.fx.GraphModule:
    return copy_graph(gm)


def _nothing_read(padding: Any, grid: Any) -> Any:
    return ~grid.everywhere()
