"""``treefx.backward``: loss and gradients of a forest that runs in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.errors import CoupledLossError, InputError
from treefx.forests.forest import Forest
from treefx.inspection.compiled_modules import modules_of
from treefx.losses.metrics import all_or_nothing
from treefx.planning.execution.boundary import all_edges
from treefx.planning.execution.execute import Executor, LogProbs, Loss, Model, logits_logprobs, scalar
from treefx.planning.execution.on_ranks import run_on_ranks
from treefx.planning.execution.ranks import Ranks, apart, common_dtype
from treefx.planning.execution.ranks_of import ranks_of
from treefx.planning.search.part import Step
from treefx.planning.search.plan import Plan
from treefx.runtime.cut import ContextRow

__all__ = ["backward"]


def backward(
    compiled: Any,
    plan: Plan | ContextRow,
    loss: Loss,
    *,
    additive: bool | None = None,
    logprobs: LogProbs = logits_logprobs,
    model_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Tensor:
    """Run a plan: the forward and the backward of all its parts.

    On a model sharded by FSDP2 (compiled as a whole) or wrapped by DDP all ranks call it together, each with the plan
    of its own forest (`treefx.scale.assign`), of any number of parts; a rank for which nothing was left runs none.
    Gradients are reduced once, after the last part, as FSDP2 or DDP would; in `no_sync`, or after
    `set_requires_gradient_sync(False)`, they stay. Under FSDP2 all parameters are gathered for so long. If one rank
    fails, all do.

    Gradients add into `.grad`, once, when all are there: an exception in the middle leaves `.grad` as it was, and
    `treefx.losses.Metrics` too. Hooks on parameters run once per part.

    Args:
        compiled: a model compiled by treefx, which returns `.logits` [1, N, V] for `input_ids` and `position_ids`
            [1, N].
        plan: from `treefx.plan`; or a rank's row from `treefx.scale.context`, which runs at once, with all ranks of its
            group: `loss` is then called on all edges, whatever `additive` says.
        loss: `loss(logp, forest)` -> scalar. `logp` [E_p] are log-probabilities of the edges of `forest`, which is the
            plan's forest with some of its edges: `forest.edge_index` [E_p] says which. It is called once per part that
            has edges, and the sum is the loss; losses of `treefx.losses` fit as they are, means included. Tensors [E]
            of your own are indexed by `forest.edge_index`; those of `treefx.losses` that take tensors [E] do it.
        additive: whether the loss is such a sum over edges. If not (ratios of sequences, DPO), `loss` is called once,
            on all edges: log-probabilities run over the parts without gradients, then the parts run again with the
            gradient of the loss. That costs one more forward. By default losses of `treefx.losses` say themselves what
            they are, when they get the first part, which is then run again, and any other loss counts as a sum: a loss
            of your own that is none needs `additive=False`.
        logprobs: `logprobs(output, row)` -> [E_p], from what the model returns and the packed row it ran on; by
            default from `output.logits`. With hidden states and `edge_logprobs(..., weight=)` the logits of a part
            never exist at once. May have further dimensions, as `torch.stack([edge_logprobs(...),
            edge_entropy(...)], 1)` has, for a loss that reads both.
        model_kwargs: further keyword arguments of the model; `{"use_cache": False}` by default.
        progress: show a progress bar.

    Returns:
        The loss, a scalar without gradient; of this rank's forest, or this rank's share of it.

    Raises:
        InputError: `plan` is neither, or the loss is no scalar tensor.
        UnsupportedError: the model cannot run in parts; the message says why.
        ForestError: the log-probabilities or the loss do not fit the forest.
        CoupledLossError: a loss reads whole rows, and `additive` is True.
        RankError: another rank failed.

    Example:
        >>> plan = treefx.plan(forest, profile, memory_limit_bytes=24 * 2**30)
        >>> value = treefx.backward(compiled, plan, lambda logp, f: treefx.losses.sft(logp, f))
    """
    if not isinstance(plan, Plan | ContextRow):
        raise InputError(
            f"backward expected a plan from treefx.plan, or a row from treefx.scale.context, got {type(plan).__name__}"
        )
    model = Model(compiled, {"use_cache": False} if model_kwargs is None else model_kwargs, logprobs)
    ranks, gradients = ranks_of(compiled), _Gradients()
    try:
        with torch.enable_grad(), all_or_nothing(), apart(ranks):
            value = _run(model, plan, loss, _Session(ranks, gradients, additive, progress))
    except BaseException:
        gradients.put_back()
        raise
    gradients.add()
    ranks.reduce()
    return value.to(common_dtype(ranks, value.dtype))


@dataclass(frozen=True)
class _Session:
    """How a plan is run: what stays the same when it is run again."""

    ranks: Ranks
    gradients: _Gradients
    additive: bool | None
    progress: bool

    def before_backward(self, roots: list[Tensor], own: list[Tensor]) -> None:
        self.ranks.settle()
        self.gradients.adopt(roots, own)

    def forget(self) -> None:
        self.ranks.forget()
        self.gradients.put_back()


def _run(model: Model, plan: Plan | ContextRow, loss: Loss, session: _Session) -> Tensor:
    if isinstance(plan, ContextRow):
        with all_or_nothing():
            return run_on_ranks(model, plan, loss, session.before_backward)
    forest = plan.forest.to(_device_of(model.compiled, plan))
    if session.ranks.groups and forest.share is not None and forest.share.is_idle:
        return torch.zeros((), device=forest.device)  # its one row has no weight, and the others wait for no part
    try:
        return _run_parts(model, forest, plan, loss, session, session.additive is not False)
    except CoupledLossError:
        if session.additive is not None:
            raise
    session.forget()
    return _run_parts(model, forest, plan, loss, session, False)


def _run_parts(model: Model, forest: Forest, plan: Plan, loss: Loss, session: _Session, additive: bool) -> Tensor:
    executor = Executor(model, forest, plan.schedule, loss, session.before_backward)
    steps = _tracked(plan.steps, session.progress)
    with all_or_nothing():
        return _run_additive(executor, steps) if additive else _run_in_two_passes(executor, plan, steps)


def _run_additive(executor: Executor, steps: Iterable[Step]) -> Tensor:
    executor.run(steps)
    return torch.zeros((), device=executor.forest.device) if executor.value is None else executor.value


def _run_in_two_passes(executor: Executor, plan: Plan, steps: Iterable[Step]) -> Tensor:
    """Log-probabilities of all edges, the loss on them, then the parts with its gradient."""
    logp = executor.logprobs(plan.parts).requires_grad_()
    value = scalar(executor.loss(logp, all_edges(executor.forest)))
    if value.requires_grad:
        executor.before_backward([value], [logp])
        value.backward()  # type: ignore[no-untyped-call]
    weight = torch.zeros_like(logp) if logp.grad is None else logp.grad
    executor.loss = lambda part_logp, part: (part_logp * weight[part.edge_index]).sum()
    executor.run(steps)
    return value.detach()


def _device_of(compiled: Any, plan: Plan) -> torch.device:
    """Where the model's parameters are; where the forest is for a model without any."""
    for module in modules_of(compiled):
        for parameter in module.parameters():
            return parameter.device
    return plan.forest.device


def _tracked(steps: Sequence[Step], progress: bool) -> Iterable[Step]:
    if not progress:
        return steps
    from rich.progress import track

    return track(steps, description="parts")


class _Gradients:
    """Gradients made so far, in `.grad`, and what was there before, put aside until all are made."""

    def __init__(self) -> None:
        self._before: dict[Tensor, Tensor | None] = {}

    def adopt(self, roots: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Put aside `.grad` of all leaves that a backward will reach, but not of the executor's own."""
        skipped = {id(leaf) for leaf in own}
        for leaf in _leaves(roots):
            if id(leaf) not in skipped and leaf not in self._before:
                self._before[leaf] = leaf.grad
                leaf.grad = None

    def put_back(self) -> None:
        """Restore `.grad` as it was."""
        for leaf, before in self._before.items():
            leaf.grad = before
        self._before = {}

    def add(self) -> None:
        """Add what was made to what was there."""
        for leaf, before in self._before.items():
            if before is not None:
                if leaf.grad is not None:
                    before += leaf.grad
                leaf.grad = before


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
        waiting += [source for source, _ in node.next_functions]
    return found
