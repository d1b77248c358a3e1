"""Measure the cost of a model's parts: ``treefx.profile``.

Bytes and FLOPs come from the compiled graphs, times from a few measured parts.

================  ====================================================================================================
bytes             live storages of the forward, backward and K/V graphs as inductor (or AOTAutograd) gets them, operator
                  by operator, as polynomials in tokens N and boundary length P; the loss on the logits on top. Bytes
                  that no graph shows (workspaces of kernels and libraries) are the difference to the measured peak of a
                  few parts, fitted as `constant + a N + b P` from above
FLOPs             products of matrices per token, attention per visible (query, key) pair A
seconds           `part + token N + pair A` for each of the three runs, fitted to the measured parts
================  ====================================================================================================
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn

from treefx.documents import parse_document, read_document
from treefx.errors import InputError, UnsupportedError
from treefx.extras import needs
from treefx.forests.forest import Forest
from treefx.inspection.compiled_modules import modules_of
from treefx.inspection.inspector import inspect
from treefx.kernels.common import accumulation_dtype
from treefx.passes.analysis import Rewritten
from treefx.planning.cost.device import uncounted
from treefx.planning.cost.graph_cost import (
    Flops,
    Sizes,
    TrainGraphs,
    backward_rows,
    count_flops,
    forward_rows,
    held_row,
    kv_rows,
    lists_row,
    state_cost,
)
from treefx.planning.cost.liveness import storage_bytes
from treefx.planning.cost.model import LOGITS_ROWS, MONOMIALS, Bytes, CostModel, Seconds, coefficients, sum_rows
from treefx.planning.execution.execute import LogProbs, logits_logprobs
from treefx.planning.execution.gradients import Gradients
from treefx.planning.execution.measure import Sample, measure_steps, probe_schedules
from treefx.planning.execution.nonnegative import fit_nonnegative
from treefx.planning.execution.ranks import Ranks, apart
from treefx.planning.execution.ranks_of import ranks_of
from treefx.planning.execution.unseen import add_unseen
from treefx.reason_codes import with_code
from treefx.runtime.records import find
from treefx.views import find_view

__all__ = ["Profile", "profile"]

_UNMEASURED = "TFX205"

_FOREST_BYTES = {"token": 116, "raw_token": 16}
"""Bytes that describe the forest: 48 per token, its edges 52, its part 16; two numbers per raw token."""

N, P, A = sympy.symbols("N P A", integer=True, nonnegative=True)
"""Tokens, boundary tokens and visible pairs, in the expressions of a profile."""
BLOCK = sympy.Function("block", nonnegative=True)
"""`cost.flash_block`, in the same."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile:
    """Bytes, FLOPs and seconds of parts of one compiled model.

    Attributes:
        cost: cost model for the planner.
        flops: of "forward", "backward" and "kv".
        samples: the measured steps.
        inner: the inner compiler.
        device: where.
    """

    cost: CostModel
    flops: dict[str, Flops]
    samples: tuple[Sample, ...]
    inner: str
    device: str

    def __repr__(self) -> str:
        steps = f"{len(self.samples)} measured step{'s' * (len(self.samples) != 1)}"
        resident = self.cost.resident_bytes / 2**20
        return f"Profile({steps} on {self.device}, inner={self.inner!r}, {resident:,.1f} MiB resident; see .explain())"

    @property
    def bytes(self) -> dict[str, sympy.Expr]:
        """Expressions in N and P: "saved", and the peaks "forward", "backward" and "kv"."""
        return {name: _expression(getattr(self.cost, name)) for name in ("saved", "forward", "backward", "kv")}

    @property
    def flop_expressions(self) -> dict[str, sympy.Expr]:
        """Expressions in N and A, per run."""
        return {name: flops.expression(N, A) for name, flops in self.flops.items()}

    @property
    def seconds(self) -> dict[str, sympy.Expr]:
        """Expressions in N and A, per run."""
        runs = {name: getattr(self.cost, f"{name}_seconds") for name in self.flops}
        return {name: fit.part + fit.token * N + fit.pair * A for name, fit in runs.items()}

    @needs("cli", "a table of a profile")
    def explain(self) -> str:
        """Format tables: expressions, and predicted against measured bytes and seconds."""
        text: str = find_view("explain_profile")(self)
        return text

    def to_json(self) -> str:
        """Everything, as JSON; `from_json` reads it."""
        fields = {
            "cost": self.cost.to_dict(),
            "flops": {name: asdict(flops) for name, flops in self.flops.items()},
            "samples": [sample.to_dict() for sample in self.samples],
            "inner": self.inner,
            "device": self.device,
        }
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Read the text of `to_json`.

        Raises:
            InputError: it is something else.
        """
        return parse_document(text, "the text of a profile", "what Profile.to_json writes").read(cls)

    def save(self, path: "str | PathLike[str]") -> None:
        """Write the profile to a file, to plan again without measuring."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: "str | PathLike[str]") -> "Profile":
        """Read a file that `save` wrote.

        Raises:
            InputError: the file holds something else; the message names it and the field.
            OSError: the file cannot be read.
        """
        return read_document(path, "what Profile.to_json writes").read(cls)


def profile(
    compiled: Any,
    forest: Forest,
    *,
    logprobs: LogProbs = logits_logprobs,
    model_kwargs: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (128, 512),
) -> Profile:
    """Measure the cost of parts of a forest in a compiled model.

    Runs a few short parts along the forest's longest row, forward and backward; `.grad` stays as it was, and no hook on
    a parameter runs. On a model sharded by FSDP2 or wrapped by DDP all ranks call it together; each measures for
    itself, so broadcast one result (`to_json`) before `treefx.scale.shard_rows`, which needs the same cost on all.

    Args:
        compiled: a model compiled by treefx, `inner` "inductor" or "aot_eager".
        forest: the forest to be planned, or one as deep.
        logprobs, model_kwargs: as for `treefx.forward_backward`.
        lengths: tokens of the parts that are measured.

    Returns:
        The cost model with its samples, in bytes, FLOPs and seconds, for `treefx.plan`.

    Raises:
        InputError: `compiled` has no parameters, or a length is not positive.
        UnsupportedError: the model cannot run in parts, or has no graphs to read (inner="eager").
    """
    modules = [module for module in modules_of(compiled) if any(True for _ in module.parameters())]
    if not modules:
        raise InputError(f"profile expects a model compiled by treefx, got {type(compiled).__name__}")
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths must be positive numbers of tokens, got {lengths!r}")
    ranks = ranks_of(compiled)
    with apart(ranks):
        found = _measure(compiled, modules[0], forest, logprobs, model_kwargs, sorted(lengths), ranks)
    ranks.abandon()
    return found


def _measure(
    compiled: Any,
    model: nn.Module,
    forest: Forest,
    logprobs: LogProbs,
    model_kwargs: Mapping[str, Any] | None,
    lengths: Sequence[int],
    ranks: Ranks,
) -> Profile:
    forest = forest.to(next(model.parameters()).device)
    kwargs = {"use_cache": False} if model_kwargs is None else model_kwargs
    samples: list[Sample] = []
    gradients = Gradients(ranks.reduced)
    for schedule in probe_schedules(forest, lengths):
        samples += measure_steps(compiled, forest, schedule, kwargs, logprobs, gradients)
    resident = _resident_bytes(model) + ranks.resident_bytes()
    return _build(compiled, model, samples, resident, keeps_logits=logprobs is logits_logprobs)


# Long: one figure of the profile after another.
def _build(compiled: Any, model: nn.Module, samples: list[Sample], resident: int, *, keeps_logits: bool) -> Profile:
    graphs, kv_only = _find_graphs(compiled, model)
    _warn_of_uncounted(graphs)
    sizes, kv_sizes = Sizes.of(graphs.rewritten), Sizes.of(kv_only)
    assert graphs.rewritten.cut is not None
    caches = graphs.rewritten.cut.caches
    per_token = [cache.shape[2] * cache.shape[3] for cache in caches]
    kv = sum(int(n) * cache.element_size() for n, cache in zip(per_token, caches, strict=True))
    kv_grad = sum(int(n) * accumulation_dtype(cache).itemsize for n, cache in zip(per_token, caches, strict=True))
    held = held_row(graphs, sizes, keeps_results=keeps_logits)
    logits = sizes.row(_logits_bytes(graphs)) if keeps_logits else [0.0] * len(MONOMIALS)
    chunks = [_chunk_bytes(graphs, backward=x) if keeps_logits else 0.0 for x in (False, True)]
    chunk, chunk_again = (coefficients(logits_rows=figure) for figure in chunks)
    lists, lists_again = (lists_row(graphs, sizes, backward=x) for x in (False, True))
    forward = [*forward_rows(graphs, sizes), sum_rows(held, chunk, lists)]
    # While gradients of the boundary are added up, one K or V at a time is copied and converted.
    adding = coefficients(boundary=(kv + kv_grad) / max(len(caches), 1))
    backward, attention = backward_rows(graphs, sizes)
    backward.append(sum_rows(held, logits, chunk_again, lists_again))
    backward[-2] = sum_rows(backward[-2], adding)
    bare = CostModel(
        resident_bytes=resident,
        saved=Bytes([held]),
        kv_bytes_per_token=kv,
        kv_grad_bytes_per_token=kv_grad,
        kv_tangent_bytes_per_token=kv if kv_grad != kv else 0,
        mask_element_bytes=_mask_bytes(caches),
        states=state_cost(graphs, kv_only),
        forest_bytes_per_token=_FOREST_BYTES["token"],
        forest_bytes_per_raw_token=_FOREST_BYTES["raw_token"],
        forward=Bytes(forward),
        backward=Bytes(backward),
        kv=Bytes(kv_rows(kv_only, kv_sizes)),
        forward_seconds=_fit_seconds(samples, "forward"),
        backward_seconds=_fit_seconds(samples, "backward"),
        kv_seconds=_fit_seconds(samples, "kv"),
    )
    cost = add_unseen(bare, samples, Bytes(attention or backward))
    flops = {"forward": graphs.forward, "backward": graphs.backward}
    counted = {name: count_flops(gm, sizes) for name, gm in flops.items()}
    return Profile(
        cost=cost,
        flops=counted | {"kv": count_flops(kv_only.gm, kv_sizes)},
        samples=tuple(samples),
        inner=inspect(compiled).stats["inner"],
        device=str(next(model.parameters()).device),
    )


def _warn_of_uncounted(graphs: TrainGraphs) -> None:
    names = uncounted(graphs.forward, graphs.backward)
    if names:
        text = (
            f"treefx.profile does not count the memory of {' and '.join(names)} on a GPU: in parts longer than those "
            "that it measures, a run can exceed its limit. Give it lengths as long as your parts"
        ) + (", or train in bfloat16 or float32" if "float64" in names[0] else "")
        warnings.warn(with_code(text, _UNMEASURED), RuntimeWarning, stacklevel=5)


def _mask_bytes(caches: Sequence[torch.Tensor]) -> int:
    """Bytes per element of attention's masks: on the CPU, where it runs tile by tile."""
    tiled = [cache for cache in caches if cache.device.type == "cpu" and cache.dtype != torch.float64]
    return accumulation_dtype(tiled[0]).itemsize if tiled else 0


def _find_graphs(compiled: Any, model: nn.Module) -> tuple[TrainGraphs, Rewritten]:
    """The graphs that the measured parts ran."""
    stages = inspect(compiled).graphs
    runs = find(model.parameters())
    rewrites = [item for run in runs for item in run.graph.rewrites if item.cut is not None]
    train = [item for item in rewrites if item.gm is stages.get("rewritten")]
    kv = [item for item in rewrites if item.cut is not None and item.cut.run == "kv"]
    if not train or not kv or "forward" not in stages or "backward" not in stages:
        raise UnsupportedError(
            f"a profile reads the forward and backward graphs of parts, but there are {', '.join(stages) or 'none'}; "
            "compile with options={'inner': 'inductor'} or 'aot_eager'"
        )
    return TrainGraphs(train[-1], stages["forward"], stages["backward"]), kv[-1]


def _resident_bytes(model: nn.Module) -> int:
    """Sum the bytes of parameters, buffers and gradients, including gradients not yet made."""
    held = [*model.parameters(), *model.buffers()]
    held += [parameter for parameter in model.parameters() if parameter.requires_grad]
    held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _logits(graphs: TrainGraphs) -> list[torch.Tensor]:
    """Return the floating-point results of tokens.

    A counter of the model, which it writes back, may be a single number.
    """
    results = [value for value in graphs.results if isinstance(value, torch.Tensor) and value.dim()]
    return [value for value in results if value.is_floating_point()]


def _logits_bytes(graphs: TrainGraphs) -> sympy.Expr:
    """Return bytes of the loss's input and its gradient."""
    return storage_bytes(_logits(graphs))


def _chunk_bytes(graphs: TrainGraphs, *, backward: bool = False) -> float:
    """Return bytes of a row of logits while log-probabilities are computed.

    It is held twice, in the backward once.

    In the backward a copy in the logits' own dtype comes before, where that is another.
    """
    rows = [0.0]
    for x in _logits(graphs):
        wide = accumulation_dtype(x)
        first = 0 if x.dtype == wide else x.element_size()
        rows.append(int(x.shape[-1]) * (first + wide.itemsize if backward else 2.0 * wide.itemsize))
    return max(rows)


def _fit_seconds(samples: Sequence[Sample], kind: str) -> Seconds:
    """`part + token N + pair A` for one kind of step."""
    chosen = [sample for sample in samples if sample.kind == kind]
    features = [(1, sample.size.tokens, sample.size.pairs) for sample in chosen]
    return Seconds(*fit_nonnegative(features, [sample.seconds for sample in chosen]).tolist())


def _expression(figures: Bytes) -> sympy.Expr:
    """The largest of the polynomials, E left out: no graph has it."""
    monomials = (1, N, P, 0, N * N, N * P, sympy.Min(N, LOGITS_ROWS), BLOCK(N, P))
    sums = [sum(_rounded(a) * x for a, x in zip(row, monomials, strict=True)) for row in figures.rows]
    # Which of so many is the largest for all N and P is not worth the seconds that it takes to ask.
    return sympy.Max(*sums, evaluate=False) if len(sums) > 1 else sums[0]


def _rounded(figure: float) -> float:
    """Whole bytes, but for a pair of a block, of which there are many."""
    return round(figure) if figure > 100 else round(figure, 1)
