"""``treefx.forward_backward``: loss and gradients of a forest that runs in parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.errors import CoupledLossError, InputError
from treefx.extras import needs
from treefx.forests.forest import Forest
from treefx.inspection.compiled_modules import modules_of
from treefx.losses.metrics import all_or_nothing
from treefx.planning.execution.additive import SumCheck
from treefx.planning.execution.boundary import all_edges
from treefx.planning.execution.execute import Executor, LogProbs, Loss, Model, logits_logprobs, scalar
from treefx.planning.execution.gradients import Gradients
from treefx.planning.execution.on_ranks import run_on_ranks
from treefx.planning.execution.ranks import Ranks, agreed, apart
from treefx.planning.execution.ranks_of import ranks_of
from treefx.planning.execution.weights import weights_unchanged
from treefx.planning.search.part import Step
from treefx.planning.search.plan import Plan
from treefx.runtime.cut import ContextRow

__all__ = ["backward", "forward_backward"]


def forward_backward(
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

    On a model sharded by FSDP2 (compiled as a whole) or wrapped by DDP all ranks call it together, each with its own
    forest's plan (`treefx.scale.shard_rows`), of any number of parts; a rank without rows runs none. Gradients are
    reduced once, after the last part, as FSDP2 or DDP would; in `no_sync`, or after
    `set_requires_gradient_sync(False)`, they stay. Under FSDP2 all parameters are gathered for so long. If one rank
    fails, by an interrupt (`KeyboardInterrupt`) too, all do.

    Gradients add into `.grad` after the last part, in one backward of autograd: hooks on parameters, and an optimizer
    that steps in one, run once, with the whole gradient. Any exception leaves `.grad` as it was, and
    `treefx.losses.Metrics` too; changes by your own hooks before it persist. While gradients are added to
    those of earlier steps, a copy of the latter is held.

    Args:
        compiled: a model compiled by treefx, which returns `.logits` [1, N, V] for `input_ids` and `position_ids`
            [1, N].
        plan: from `treefx.plan`; or a rank's row from `treefx.scale.context_parallel`, which runs at once, with all
            ranks of its group: `loss` is then called on all edges, for any `additive`.
        loss: `loss(logp, forest)` -> scalar. `logp` [E_p] are log-probabilities of the edges of `forest`, which is the
            plan's forest with some of its edges: `forest.edge_index` [E_p] says which. It is called once per part that
            has edges, and the sum is the loss; losses of `treefx.losses` fit unchanged, means included. Tensors [E]
            of your own are indexed by `forest.edge_index`; those of `treefx.losses` that take tensors [E] do it.
            A function that comes for the first time is called once more, on the edges of two parts together.
        additive: whether the loss is such a sum over edges. If not (ratios of sequences, DPO), `loss` is called once,
            on all edges: log-probabilities run over the parts without gradients, then the parts run again with the
            gradient of the loss. That costs one more forward. By default, losses of `treefx.losses` report their kind
            on the first part, which then runs again if needed; your own loss counts as a sum if its value and gradient
            on the edges of two parts are the sums of those on each (the mean of `logp` is none).
        logprobs: `logprobs(output, row)` -> [E_p], from the model's output and its packed row; by
            default from `output.logits`. With hidden states and `edge_logprobs(..., weight=)` the logits of a part
            never exist at once. May have further dimensions, as `torch.stack([edge_logprobs(...),
            edge_entropy(...)], 1)` has, for a loss that reads both.
        model_kwargs: further keyword arguments of the model; `{"use_cache": False}` by default.
        progress: show a progress bar.

    Returns:
        The loss, a scalar without gradient; of this rank's forest, or this rank's share of it.

    Raises:
        InputError: `plan` is neither, or the loss is no scalar tensor.
        UnsupportedError: the model cannot run in parts, or a weight was changed between two of them; the message says
            why.
        ForestError: the log-probabilities or the loss do not fit the forest.
        CoupledLossError: the loss is no sum over edges, and `additive` is True.
        RankError: another rank failed.

    Example:
        >>> plan = treefx.plan(forest, profile, memory_limit_bytes=24 * 2**30)
        >>> value = treefx.forward_backward(compiled, plan, lambda logp, f: treefx.losses.sft(logp, f))
    """
    model = Model(compiled, {"use_cache": False} if model_kwargs is None else model_kwargs, logprobs)
    ranks = ranks_of(compiled)
    gradients = Gradients(ranks.reduced)
    end = None
    try:
        with torch.enable_grad(), all_or_nothing(), agreed(ranks, lambda: ranks.reduce(gradients.totals)) as end:
            with apart(ranks):
                value = _run(model, plan, loss, _Session(ranks, gradients, additive, progress))
            end.dtype = value.dtype
            gradients.add()
        return value.to(end.dtype)
    except BaseException:
        if end is None or not end.is_done:
            gradients.put_back()
        raise


backward = forward_backward
"""The old name."""


@dataclass(frozen=True)
class _Session:
    """Hold the settings of a run that stay the same when it is run again."""

    ranks: Ranks
    gradients: Gradients
    additive: bool | None
    progress: bool


def _run(model: Model, plan: Plan | ContextRow, loss: Loss, session: _Session) -> Tensor:
    if not isinstance(plan, Plan | ContextRow):
        raise InputError(
            "forward_backward expected a plan from treefx.plan, or a row from treefx.scale.context_parallel, got "
            f"{type(plan).__name__}"
        )
    with weights_unchanged(model.compiled):
        if isinstance(plan, ContextRow):
            return run_on_ranks(model, plan, loss, session.gradients.backward)
        return _run_plan(model, plan, loss, session)


def _run_plan(model: Model, plan: Plan, loss: Loss, session: _Session) -> Tensor:
    forest = plan.forest.to(_device_of(model.compiled, plan))
    if session.ranks.groups and forest.share is not None and forest.share.is_idle:
        return torch.zeros((), device=forest.device)  # its one row has no weight, and the others wait for no part
    check = SumCheck(loss)
    try:
        if session.additive or (session.additive is None and check.is_sum is not False):
            return _run_parts(model, forest, plan, check, session, True)
    except CoupledLossError as error:
        if session.additive is not None:
            raise
        if check.error is error:
            warnings.warn(f"{error}. This call did so, at the cost of one more forward", stacklevel=4)
    session.gradients.forget()
    return _run_parts(model, forest, plan, loss, session, False)


def _run_parts(model: Model, forest: Forest, plan: Plan, loss: Loss, session: _Session, additive: bool) -> Tensor:
    executor = Executor(model, forest, plan.schedule, loss, session.gradients.backward)
    steps = _tracked(plan.steps, session.progress)
    with all_or_nothing():
        value = _run_additive(executor, steps) if additive else _run_in_two_passes(executor, plan, steps)
    executor.write_changes()
    return value


def _run_additive(executor: Executor, steps: Iterable[Step]) -> Tensor:
    executor.run(steps)
    return torch.zeros((), device=executor.forest.device) if executor.value is None else executor.value


def _run_in_two_passes(executor: Executor, plan: Plan, steps: Iterable[Step]) -> Tensor:
    """Log-probabilities of all edges, the loss on them, then the parts with its gradient."""
    logp, found = executor.logprobs(plan.parts).requires_grad_(), None
    value = scalar(executor.loss(logp, all_edges(executor.forest)))
    if value.requires_grad:
        (found,) = executor.backward([value], [None], [logp])
    weight = torch.zeros_like(logp) if found is None else found
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
    with needs("cli", "a progress bar"):
        from rich.progress import track

    return track(steps, description="parts")
