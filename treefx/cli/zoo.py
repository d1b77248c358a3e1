"""``treefx doctor --zoo``: every model of the zoo, treefx against eager on one padded batch that shares prefixes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import treefx
from treefx.cli.zoo_exact import in_float64
from treefx.cli.zoo_models import VOCABULARY, ZooModel, zoo_models
from treefx.data import Batch
from treefx.errors import InputError, TreefxError
from treefx.passes.flop_share import FlopShare, flop_share
from treefx.report import find

__all__ = ["ZooRow", "check_model", "choose", "run_zoo", "shared_rows"]

_TOLERANCE = 1e-5
_SMALLEST = 1e-3
"""Gradients below this share of the model's largest are judged against it: some are zero but for rounding."""
_ROUNDING = 1.5
"""How much further from float64 than eager a result beyond the tolerance may be."""
_Step = tuple[Tensor, dict[str, Tensor]]
"""A loss, and gradients by parameter name."""


@dataclass(frozen=True)
class ZooRow:
    """What one model did. Errors are relative; shares are of floating-point operations of one forward pass."""

    model: str
    library: str
    verdict: str
    """"packed": exact, all attention and products with parameters once per distinct token; "partly": exact, some of
    them on rows; "rows": exact, nothing packed; "wrong"; "refused"; "failed"; "not installed"."""
    loss_error: float | None = None
    gradient_error: float | None = None
    raw_tokens: int = 0
    tokens: int = 0
    distinct_tokens: int = 0
    attention_rewritten: int = 0
    packed_share: float = 0.0
    """Of attention, projections, MLPs, experts and the head."""
    packed_share_of_all: float = 0.0
    """The same with mixers that are not attention in the total."""
    expansions: list[dict[str, Any]] = field(default_factory=list)
    note: str | None = None
    """Why nothing ran packed, or why there is no result."""
    float64_errors: tuple[float, float] | None = None
    """Largest gradient error of treefx and of eager against float64; measured where they differ beyond 1e-5."""
    seconds: float = 0.0
    """Time of the check, compilation included."""


def choose(names: Sequence[str]) -> list[ZooModel]:
    """The models of these names, or all.

    Raises:
        InputError: A name is not in the zoo.
    """
    models = {model.name: model for model in zoo_models()}
    unknown = [name for name in names if name not in models]
    if unknown:
        raise InputError(f"the zoo has the models {', '.join(models)}; got {', '.join(unknown)}")
    return [models[name] for name in names] if names else list(models.values())


def run_zoo(
    names: Sequence[str] = (), *, workers: int = 1, inner: str = "aot_eager", on_start: Callable[[str], None] = print
) -> Iterator[ZooRow]:
    """Check models one after the other, or in ``workers`` processes; rows come as they are done.

    Args:
        names: Which models; none for all.
        workers: Number of processes.
        inner: Inner compiler of the backend.
        on_start: Told the model that is being checked (with several workers: the last one that is done).
    """
    models = choose(names)
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if workers == 1:
        for model in models:
            on_start(model.name)
            yield check_model(model.name, inner)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(check_model, model.name, inner) for model in models]):
            row = done.result()
            on_start(row.model)
            yield row


def shared_rows(rows: int = 4, length: int = 20, prefix: int = 8, seed: int = 0) -> Batch:
    """Rows of different lengths over two levels of forks and one duplicate, padded on the right; the first is full."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=draw).tolist()

    stem, branches = tokens(prefix), [tokens(prefix // 2), tokens(prefix // 2)]
    full = [[*stem, *branches[row % 2], *tokens(length)][: length - 3 * (row % 3)] for row in range(rows)]
    full.append(list(full[1]))
    ids = torch.zeros(len(full), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, content in enumerate(full):
        ids[row, : len(content)] = torch.tensor(content)
        mask[row, : len(content)] = 1
    return Batch(ids, mask, ids.masked_fill(mask == 0, -100))


def check_model(name: str, inner: str = "aot_eager") -> ZooRow:
    """Loss and all gradients of one model in float32, treefx against eager."""
    (model,) = choose([name])
    start = time.perf_counter()
    torch._dynamo.reset()
    gc.collect()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = _check(model, inner)
    except Exception as error:  # one model that fails must not end the table
        refusal = _refusal(error)
        text = f"{type(error).__name__}: {error}" if refusal is None else str(refusal)
        row = ZooRow(model.name, model.library, "failed" if refusal is None else "refused", note=text.splitlines()[0])
    return replace(row, seconds=time.perf_counter() - start)


def _check(model: ZooModel, inner: str) -> ZooRow:
    torch.manual_seed(0)
    try:
        original = _spread(model.build().train())
    except (ImportError, InputError) as error:
        return ZooRow(model.name, model.library, "not installed", note=str(error))
    return _compare(model, original, inner)


def _refusal(error: BaseException | None) -> TreefxError | None:
    """What treefx raised, alone or wrapped by Dynamo."""
    while error is not None and not isinstance(error, TreefxError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _spread(model: nn.Module) -> nn.Module:
    """Scale matrices up: with the usual small weights attention is uniform, and a wrong mask would hardly show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def _compare(model: ZooModel, original: nn.Module, inner: str) -> ZooRow:
    batch = shared_rows()
    twin = copy.deepcopy(original)
    options = {"inner": inner, "min_sharing": 1.0}
    compiled = torch.compile(twin, backend="treefx", options=options)  # type: ignore[arg-type]
    expected, got = _step(original, original, batch), _step(twin, compiled, batch)
    errors = _errors(got, expected)
    exact = None if max(errors) <= _TOLERANCE else in_float64(original, lambda model: _step(model, model, batch))
    float64_errors = None if exact is None else (max(_errors(got, exact)), max(_errors(expected, exact)))
    return _row(model, twin, compiled, batch, errors, float64_errors)


def _errors(got: _Step, expected: _Step) -> tuple[float, float]:
    """Of the loss, and the largest of the gradients."""
    largest = max(float(grad.abs().max()) for grad in expected[1].values())
    errors = [_relative(got[1].get(name), grad, _SMALLEST * largest) for name, grad in expected[1].items()]
    return _relative(got[0], expected[0], 0.0), max(errors)


def _step(model: nn.Module, call: Any, batch: Batch) -> _Step:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)  # the same random draws for both
    result = call(**batch.model_inputs())
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    loss.backward()  # type: ignore[no-untyped-call]
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), named


def _relative(got: Tensor | None, expected: Tensor, floor: float) -> float:
    if got is None or not bool(got.isfinite().all()):
        return float("inf")
    scale = max(float(expected.abs().max()), floor)
    difference = float((got.double() - expected.double()).abs().max())
    return difference / scale if scale else difference


def _row(
    model: ZooModel,
    twin: nn.Module,
    compiled: Any,
    batch: Batch,
    errors: tuple[float, float],
    float64_errors: tuple[float, float] | None,
) -> ZooRow:
    stats = treefx.inspect(compiled).stats
    share = sum((flop_share(graph) for graph in _labelled(twin)), FlopShare())
    distinct = treefx.Forest.from_padded(batch.input_ids, batch.attention_mask).num_tokens
    note = _breaks(stats["attention_rewritten"]) or stats["fallback"]
    row = ZooRow(
        model.name,
        model.library,
        "rows",
        *errors,
        batch.raw_tokens,
        stats["tokens"] or batch.raw_tokens,
        distinct,
        stats["attention_rewritten"],
        0.0 if note else share.of_attention_and_mlps,
        0.0 if note else share.of_all,
        list(stats["expansions"]),
        note,
        float64_errors,
    )
    return replace(row, verdict=_verdict(row))


def _labelled(twin: nn.Module) -> list[torch.fx.GraphModule]:
    """The labelled graphs that ran packed."""
    runs = find(twin.parameters())
    return [rewritten.traced for run in runs for rewritten in run.graph.rewrites]


def _breaks(attentions: int) -> str | None:
    """Where nothing was rewritten: how Dynamo cut the model, which hides the token ids from its attention."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    if attentions or not reasons:
        return None
    return "Dynamo cut the model: " + next(iter(reasons)).splitlines()[0]


def _verdict(row: ZooRow) -> str:
    assert row.loss_error is not None and row.gradient_error is not None
    if not (max(row.loss_error, row.gradient_error) <= _TOLERANCE or _as_near_as_eager(row)):
        return "wrong"
    if row.packed_share == 1.0:
        return "packed"
    return "partly" if row.packed_share else "rows"


def _as_near_as_eager(row: ZooRow) -> bool:
    """Whether the difference is rounding: some gradients are zero in exact arithmetic, or sums that all but cancel."""
    assert row.float64_errors is not None and row.loss_error is not None
    return row.loss_error <= _TOLERANCE and row.float64_errors[0] <= _ROUNDING * row.float64_errors[1] <= 1e-3
