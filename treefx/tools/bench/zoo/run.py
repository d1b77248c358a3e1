"""Check every model of the zoo against eager on padded batches that share."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import treefx
from treefx.data import Batch
from treefx.errors import InputError, TreefxError
from treefx.runtime.records import find
from treefx.tools.bench.job.processes import Failure, Note, each_apart
from treefx.tools.bench.zoo.batches import zoo_batches
from treefx.tools.bench.zoo.exact import Step, compiled_in_float64, in_float64, sizes_of_sums, take_step
from treefx.tools.bench.zoo.flop_share import FlopShare, flop_share
from treefx.tools.bench.zoo.models import ZooModel, zoo_models

__all__ = ["LONGEST_CHECK", "VERDICTS", "ZooBatch", "ZooRow", "check_model", "choose", "run_zoo"]

_TOLERANCE = 1e-5
_SMALLEST = 1e-3
"""Gradients below this share of the model's largest are judged against it: some are zero but for rounding."""
_ROUNDING = 1.5
"""How much further from float64 than eager a result beyond the tolerance may be."""
_LARGEST = 1e-3
"""What no rounding may exceed."""
_COARSE = 4.0
"""How much further where the step in float64 is exact."""
_EXACT = 1e-10
VERDICTS = ("packed", "partly", "rows", "refused", "fails in PyTorch", "rounds", "wrong", "crashed", "not installed")
"""From best to worst. "packed": exact, all attention and products with parameters once per distinct token; "partly":
exact, some of them on rows; "rows": exact, nothing packed; "refused": by name, by treefx; "fails in PyTorch": eager, or
torch.compile with the inner compiler alone, fails too; "rounds": exact in float64 (1e-10), and in float32 1.5 to 4
times as far from it as eager; the last: no result."""
LONGEST_CHECK = 3600.0
"""Seconds after which a process that checks a model is taken to hang."""
_CHECKS_PER_PROCESS = 12
_checked_here = 0


@dataclass(frozen=True)
class ZooBatch:
    """Hold one model's results on one batch: relative errors, shares of a forward's FLOPs."""

    shape: str
    """Rows, positions and padding: ``"5 x 20 right"``."""
    verdict: str
    """One of :data:`VERDICTS` but the last."""
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
    """Largest gradient error of treefx and of eager against float64; measured where they differ beyond 1e-5. They
    are relative to the summed sizes of what the rows contribute to an element, where these are larger."""
    compiles: int = 0
    """Compilations up to and with this batch: the first is compiled for its shape, the next for all."""
    code: str = ""
    """The code of what runs on rows, and the line of the model: of everything, or of the first operator."""
    line: str = ""
    exactness: float | None = None
    """Largest error of treefx in float64, relative as above; measured where float32 rounds more than eager may."""


@dataclass(frozen=True)
class ZooRow:
    """What one model did: the worst of its batches, and all of them."""

    model: str
    library: str
    verdict: str
    """One of :data:`VERDICTS`."""
    loss_error: float | None = None
    gradient_error: float | None = None
    raw_tokens: int = 0
    """Of all batches, as the next two."""
    tokens: int = 0
    distinct_tokens: int = 0
    attention_rewritten: int = 0
    packed_share: float = 0.0
    packed_share_of_all: float = 0.0
    expansions: list[dict[str, Any]] = field(default_factory=list)
    note: str | None = None
    float64_errors: tuple[float, float] | None = None
    batches: list[ZooBatch] = field(default_factory=list)
    compiles: int = 0
    """Of all batches."""
    code: str = ""
    line: str = ""
    seconds: float = 0.0
    """Time of the check, compilation included."""
    exactness: float | None = None
    """The largest of the batches."""


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
    names: Sequence[str] = (),
    *,
    workers: int = 0,
    inner: str = "aot_eager",
    batches: int = 2,
    seconds: float = LONGEST_CHECK,
    on_start: Callable[[str], None] = print,
) -> Iterator[ZooRow]:
    """Check models one after the other; rows come as they are done.

    Args:
        names: Which models; none for all.
        workers: Number of processes, one after another for what remains where one dies or hangs; 0 for this one.
        inner: Inner compiler of the backend.
        batches: Number of batches, no two of one shape, through one compiled model.
        seconds: Time that one model may take; with workers.
        on_start: Told the model that is being checked (with workers: the last one that is done).
    """
    models = choose(names)
    if workers < 0:
        raise InputError(f"workers must be 0 for this process or the number of others, got {workers}")
    if workers:
        yield from _in_processes(models, (workers, seconds), inner, batches, on_start)
        return
    for model in models:
        on_start(model.name)
        yield check_model(model.name, inner, batches)


def _in_processes(
    models: Sequence[ZooModel], how: tuple[int, float], inner: str, batches: int, on_start: Callable[[str], None]
) -> Iterator[ZooRow]:
    """Deal the models out to a number of processes, which have so many seconds for each.

    A thread per process waits for its rows.
    """
    done, (workers, seconds) = SimpleQueue[ZooRow | None](), how

    def serve(part: Sequence[ZooModel]) -> None:
        try:
            pieces = [(model.name, model.library, inner, batches) for model in part]
            for (name, library, *_), row in each_apart(_check_apart, pieces, seconds=seconds):
                done.put(ZooRow(name, library, "crashed", note=row) if isinstance(row, Failure) else row)
        finally:
            done.put(None)

    with ThreadPoolExecutor(workers) as pool:
        threads = [pool.submit(serve, models[first::workers]) for first in range(workers)]
        for row in itertools.chain.from_iterable(iter(done.get, None) for _ in threads):
            on_start(row.model)
            yield row
        for thread in threads:
            thread.result()


def _check_apart(piece: tuple[str, str, str, int], note: Note) -> tuple[ZooRow, bool]:
    """Check a model in a process for a few of them, as caches of Dynamo add up."""
    global _checked_here
    _checked_here += 1
    torch.set_num_threads(1)
    name, _, inner, batches = piece
    note(name)
    return check_model(name, inner, batches), _checked_here < _CHECKS_PER_PROCESS


def check_model(name: str, inner: str = "aot_eager", batches: int = 2) -> ZooRow:
    """Compare loss and gradients of a float32 model with eager, on batches of many shapes."""
    (model,) = choose([name])
    start = time.perf_counter()
    torch._dynamo.reset()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = _check(model, inner, batches)
    return replace(row, seconds=time.perf_counter() - start)


def _check(model: ZooModel, inner: str, batches: int) -> ZooRow:
    torch.manual_seed(0)
    try:
        original = _spread(model.build().train())
    except (ImportError, InputError) as error:
        return ZooRow(model.name, model.library, "not installed", note=str(error))
    except Exception as error:  # one model that fails must not end the table
        return _worst(model, [_without_result("", error)])
    twin = copy.deepcopy(original)
    options = {"inner": inner, "min_sharing": 1.0}
    compiled = torch.compile(twin, backend="treefx", options=options)  # type: ignore[arg-type]
    results = []
    for shape, batch in zoo_batches(batches).items():
        try:
            results.append(_compare(original, twin, compiled, shape, batch))
        except Exception as error:
            results.append(_without_result(shape, error))
            if results[-1].verdict == "crashed" and _fails_alone(original, inner, batch):
                results[-1] = replace(results[-1], verdict="fails in PyTorch")
        if results[-1].verdict == "wrong":
            results[-1] = _judged_in_float64(results[-1], original, inner, batch)
    return _worst(model, results)


def _fails_alone(original: nn.Module, inner: str, batch: Batch) -> bool:
    """Whether eager fails, or torch.compile with the inner compiler and no treefx."""
    twin = copy.deepcopy(original)
    try:
        take_step(twin, twin, batch)
        take_step(twin, torch.compile(twin, backend=inner), batch)
    except Exception:  # the model's or PyTorch's own, whatever it is
        return True
    return False


def _without_result(shape: str, error: Exception) -> ZooBatch:
    refusal = _refusal(error)
    text = f"{type(error).__name__}: {error}" if refusal is None else str(refusal)
    return ZooBatch(shape, "crashed" if refusal is None else "refused", note=_shortened(text.splitlines()[0]))


def _worst(model: ZooModel, batches: list[ZooBatch]) -> ZooRow:
    """Return a model's row: its worst batch's verdict, largest errors, all tokens."""
    worst = max(batches, key=lambda batch: VERDICTS.index(batch.verdict))
    ran = [batch for batch in batches if batch.loss_error is not None]
    alike = len({batch.verdict for batch in batches}) == 1
    note = worst.note if alike or worst.note is None else f"{worst.note} (batch {worst.shape})"
    return ZooRow(
        model.name,
        model.library,
        worst.verdict,
        max((batch.loss_error for batch in ran if batch.loss_error is not None), default=None),
        max((batch.gradient_error for batch in ran if batch.gradient_error is not None), default=None),
        sum(batch.raw_tokens for batch in ran),
        sum(batch.tokens for batch in ran),
        sum(batch.distinct_tokens for batch in ran),
        worst.attention_rewritten,
        worst.packed_share,
        worst.packed_share_of_all,
        worst.expansions,
        note,
        max((batch.float64_errors for batch in ran if batch.float64_errors is not None), default=None),
        batches,
        max((batch.compiles for batch in batches), default=0),
        worst.code,
        worst.line,
        exactness=max((batch.exactness for batch in ran if batch.exactness is not None), default=None),
    )


def _refusal(error: BaseException | None) -> TreefxError | None:
    """What treefx raised, alone or wrapped by Dynamo."""
    while error is not None and not isinstance(error, TreefxError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _spread(model: nn.Module) -> nn.Module:
    """Scale matrices up, so that attention is not uniform and a wrong mask shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def _compare(original: nn.Module, twin: nn.Module, compiled: Any, shape: str, batch: Batch) -> ZooBatch:
    expected, got = take_step(original, original, batch), take_step(twin, compiled, batch)
    errors = _errors(got, expected)
    apart = None if max(errors) <= _TOLERANCE else _float64_errors(original, batch, (got, expected))
    return _result(twin, compiled, shape, batch, errors, apart)


def _float64_errors(original: nn.Module, batch: Batch, steps: tuple[Step, Step]) -> tuple[float, float]:
    """The largest error of each of two steps against float64."""
    expected, sizes = _exact_step(original, batch)
    first, second = (max(_errors(step, expected, sizes)) for step in steps)
    return first, second


def _exact_step(original: nn.Module, batch: Batch) -> tuple[Step, dict[str, float]]:
    """Eager's step in float64, and the sizes of what rows contribute to its gradients."""

    def exact(part: Batch) -> Step:
        return in_float64(original, lambda model: take_step(model, model, part))

    return exact(batch), sizes_of_sums(original, lambda part: exact(part)[1], batch)


def _judged_in_float64(found: ZooBatch, original: nn.Module, inner: str, batch: Batch) -> ZooBatch:
    """Tell rounding in float32 from wrong results: in float64, treefx itself has to be exact."""
    if found.float64_errors is None or found.loss_error is None or found.loss_error > _TOLERANCE:
        return found
    ours, eager = found.float64_errors
    if ours > _COARSE * eager or ours > _LARGEST:
        return found
    expected, sizes = _exact_step(original, batch)
    try:
        got = compiled_in_float64(original, inner, lambda model, call: take_step(model, call, batch))
    except Exception as error:  # a float32 kernel, for example: nothing takes the verdict back
        return replace(found, note=f"{found.note}; in float64: {type(error).__name__}")
    exactness = max(_errors(got, expected, sizes))
    note = f"{found.note}; in float64 it is off by {exactness:.0e}"
    return replace(found, verdict="rounds" if exactness <= _EXACT else "wrong", exactness=exactness, note=note)


def _errors(got: Step, expected: Step, sizes: Mapping[str, float] = MappingProxyType({})) -> tuple[float, float]:
    """Return errors of the loss, and the largest of gradients, judged by ``sizes``."""
    floor = _SMALLEST * max(float(grad.abs().max()) for grad in expected[1].values())
    errors = [_relative(got[1].get(name), grad, max(floor, sizes.get(name, 0.0))) for name, grad in expected[1].items()]
    return _relative(got[0], expected[0], 0.0), max(errors)


def _relative(got: Tensor | None, expected: Tensor, floor: float) -> float:
    if got is None or not bool(got.isfinite().all()):
        return float("inf")
    scale = max(float(expected.abs().max()), floor)
    difference = float((got.double() - expected.double()).abs().max())
    return difference / scale if scale else difference


def _result(
    twin: nn.Module,
    compiled: Any,
    shape: str,
    batch: Batch,
    errors: tuple[float, float],
    float64_errors: tuple[float, float] | None,
) -> ZooBatch:
    stats = treefx.inspect(compiled).stats
    share = sum((flop_share(graph) for graph in _labelled(twin)), FlopShare())
    distinct = treefx.Forest.from_padded(batch.input_ids, batch.attention_mask).num_tokens
    note = _shortened(stats["fallback"] or _breaks(stats) or "") or None
    result = ZooBatch(
        shape,
        "rows",
        *errors,
        batch.raw_tokens,
        stats["tokens"] or batch.raw_tokens,
        distinct,
        stats["attention_rewritten"],
        0.0 if note else share.of_attention_and_mlps,
        0.0 if note else share.of_all,
        [{**item, "line": _shortened(item["line"] or "")} for item in stats["expansions"]],
        note,
        float64_errors,
        stats["compiles"],
        *_root(stats),
    )
    verdict = _verdict(result)
    if verdict == "wrong" and float64_errors is not None:
        ours, eager = float64_errors
        result = replace(result, note=_FAR.format(ours, eager, ours / eager if eager else float("inf"), _ROUNDING))
    return replace(result, verdict=verdict)


_FAR = "its largest error against float64 is {:.2e}, eager's is {:.2e}: {:.2f} times, and {} are allowed"


def _root(stats: Mapping[str, Any]) -> tuple[str, str]:
    """The code and the line of what runs on rows: of the call, or of the first operator that is not packed again."""
    if stats["fallback"]:
        return stats["fallback_code"], ""
    first = next((item for item in stats["expansions"] if not item.get("contracted")), None)
    return (first["code"], _shortened(first["line"] or "")) if first else ("", "")


def _shortened(text: str) -> str:
    """A text whose paths begin behind the folder of all libraries."""
    return re.sub(r"\S*site-packages/", "", text)


def _labelled(twin: nn.Module) -> list[torch.fx.GraphModule]:
    """The labelled graphs that ran packed."""
    runs = find(twin.parameters())
    return [rewritten.traced for run in runs for rewritten in run.graph.rewrites]


def _breaks(stats: Mapping[str, Any]) -> str | None:
    """Explain an unrewritten graph: how Dynamo cut the model."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    if stats["attention_rewritten"] or stats["graphs"] == 1 or not reasons:
        return None
    return "Dynamo cut the model: " + next(iter(reasons)).splitlines()[0]


def _verdict(row: ZooBatch) -> str:
    assert row.loss_error is not None and row.gradient_error is not None
    if not (max(row.loss_error, row.gradient_error) <= _TOLERANCE or _as_near_as_eager(row)):
        return "wrong"
    if row.packed_share == 1.0:
        return "packed"
    return "partly" if row.packed_share else "rows"


def _as_near_as_eager(row: ZooBatch) -> bool:
    """Return whether a difference is rounding, of gradients that are zero or cancel.

    The error against float64 is judged by the summands, and holds the same bound as that against eager; or it is no
    larger than eager's.
    """
    assert row.float64_errors is not None and row.loss_error is not None
    ours, eager = row.float64_errors
    return row.loss_error <= _TOLERANCE and (ours <= _TOLERANCE or ours <= _ROUNDING * eager <= _LARGEST)
