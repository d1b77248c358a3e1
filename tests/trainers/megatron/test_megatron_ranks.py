"""Megatron's ranks on distinct tokens: tensor, sequence, expert and pipeline parallelism of two processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import treefx
from tests.oracle import FLOAT64
from tests.scale.ranks import run_ranks
from tests.trainers.megatron import engine, routes
from treefx.errors import UnsupportedError
from treefx.integrations.megatron import convert, unconvert

pytest.importorskip("megatron.core", reason="needs megatron-core")

ROWS = engine.rows_of(4, 2, 3)
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
SEQUENCE: dict[str, Any] = {**TENSOR, "sequence_parallel": True}
COUNTED = engine.KINDS["losses of experts"]
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def compared(options: dict[str, Any], want: Callable[[Any], Any], got: Callable[[Any], Any], **of: Any) -> float:
    """The largest difference between two steps of a model, the second one converted."""
    model = engine.model(**options)
    before = want(model)
    return engine.differ(got(convert(model, **of)), before)


def tensor_cases(rank: int) -> Iterator[tuple[str, float]]:
    def alone(model: Any) -> Any:
        return engine.separately(model, ROWS, 2)

    def packed(model: Any) -> Any:
        return engine.packed(model, ROWS, 2)

    def even(model: Any) -> Any:
        return engine.padded(model, engine.rows_of(4, 3, 5))

    yield "tensor", compared(TENSOR, alone, packed)
    yield "tensor, packed head", compared(TENSOR, alone, packed, pack_lm_head=True)
    yield "tensor, losses of labels", compared({**TENSOR, "parallel_output": True}, alone_losses, packed_losses)
    yield "sequence", compared(SEQUENCE, alone, packed)
    yield "sequence, packed head", compared(SEQUENCE, alone, packed, pack_lm_head=True)
    yield "sequence, losses of labels", compared({**SEQUENCE, "parallel_output": True}, alone_losses, packed_losses)
    yield "sequence, experts", compared({**SEQUENCE, **engine.EXPERTS}, alone, packed)
    yield "sequence, latent", compared({**SEQUENCE, **engine.KINDS["latent"]}, alone, packed)
    yield "sequence, replayed routes", replayed(SEQUENCE, rank)
    yield "sequence, losses of experts", compared({**SEQUENCE, **COUNTED, **RECOMPUTED}, even, even)


def replayed(options: dict[str, Any], rank: int) -> float:
    """As `compared`, where each rank hands its routers the routes of its positions; also of what they record."""
    given, model = routes.draw(ROWS), routes.model(**options)
    want = routes.separately(model, ROWS, given, rank, 2)
    found = engine.differ(routes.packed(convert(model), ROWS, given, rank, 2), want)
    recorded = []
    for change in (unconvert, convert):
        routes.set_action("record")
        engine.padded(change(model), [row[:4] for row in ROWS])
        recorded.append([module.router_replay.recorded_topk_idx for module in routes.routers(model)])
    return found if all(map(torch.equal, *recorded)) else float("inf")


def alone_losses(model: Any) -> Any:
    losses = []
    for row in ROWS:
        even = F.pad(row, (0, len(row) % 2))
        found = model(even[None], torch.arange(len(even))[None], None, labels=even.roll(-1)[None])
        losses.append(found[0, : len(row) - 1].sum())
    return engine.gradients(model, torch.stack(losses).sum())


def packed_losses(model: Any) -> Any:
    ids, params, begins = engine.sequences(ROWS, 2)
    found = model(ids, None, None, labels=ids.roll(-1, 1), packed_seq_params=params)[0]
    losses = [found[at : at + len(row) - 1].sum() for at, row in zip(begins, ROWS, strict=False)]
    return engine.gradients(model, torch.stack(losses).sum())


def expert_cases(rank: int) -> Iterator[tuple[str, float]]:
    """Ranks with other rows in batches of one shape: they have other numbers of distinct tokens."""
    lengths = (4, 2, 3)
    rows = engine.rows_of(*lengths, seed=rank) if rank else [ROWS[0]] * 3
    rows = [F.pad(row, (0, 13 - len(row))) for row in [*rows, *rows][:4]]

    def step(model: Any) -> Any:
        return engine.padded(model, rows)

    for name, options in (("experts", engine.EXPERTS), ("losses of experts", COUNTED)):
        yield name, compared({**options, "expert_model_parallel_size": 2}, step, step)
    ragged = engine.rows_of(*((1, 5, 2) if rank else lengths), seed=rank)
    options = {**engine.EXPERTS, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2}
    yield (
        "experts, all to all",
        compared(options, lambda model: engine.separately(model, ragged), lambda model: engine.packed(model, ragged)),
    )
    model = engine.model(**engine.EXPERTS, expert_model_parallel_size=2)
    apart = torch.arange(12).view(4, 3) if rank else torch.ones(4, 3, dtype=torch.int64)
    want = model(apart, torch.arange(3).expand(4, 3), None)
    found = convert(model)(apart, torch.arange(3).expand(4, 3), None)
    yield "experts, rows on one rank", float((found - want).abs().max())
    yield "experts, rows on all ranks", float(treefx.inspect(model).stats["ran"] != "ordinary")


def pipeline_cases(rank: int) -> Iterator[tuple[str, float]]:
    """Megatron's own schedule, one forward and one backward in turn, over two batches of sequences."""
    batches = [engine.rows_of(4, 2), engine.rows_of(1, 3, 2, seed=5)]
    stage = {"pre_process": rank == 0, "post_process": rank == 1}
    options = {
        "num_layers": 2, "pipeline_model_parallel_size": 2, "variable_seq_lengths": True, **stage, **RECOMPUTED,
        "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip

    def alone(model: Any) -> Any:
        return scheduled(model, [[row] for rows in batches for row in rows], packs=False)

    def packed(model: Any) -> Any:
        return scheduled(model, batches, packs=True)

    yield "pipeline", compared(options, alone, packed)
    yield "pipeline, experts", compared({**engine.EXPERTS, **options}, alone, packed)
    model = convert(engine.model(**options))
    try:
        model(None, None, None)
        yield "pipeline, no ids", 1.0
    except UnsupportedError as error:
        yield "pipeline, no ids", float("every pipeline stage" not in str(error))
    unconvert(model)


def scheduled(model: Any, batches: list[list[Tensor]], packs: bool) -> Any:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(data: Iterator[list[Tensor]], model: Any) -> Any:
        rows = next(data)
        ids, params, begins = engine.sequences(rows)
        out = model(ids, torch.arange(ids.shape[1])[None], None, packed_seq_params=params if packs else None)

        def loss(logits: Tensor) -> Any:
            total = torch.stack([engine.nll(logits[0, at:], row) for at, row in zip(begins, rows, strict=False)]).sum()
            return total * len(batches), {"loss": total.detach()}

        return out, loss

    model.zero_grad(set_to_none=True)
    model.config.no_sync_func = model.config.grad_scale_func = model.config.finalize_model_grads_func = None
    found = get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(batches), model=model, num_microbatches=len(batches),
        seq_length=16, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    loss = torch.stack([one["loss"] for one in found]).sum() if found else torch.ones(())
    return loss, {name: x.grad.clone() for name, x in model.named_parameters()}


CASES: tuple[tuple[Callable[[int], Iterator[tuple[str, float]]], dict[str, int]], ...] = (
    (tensor_cases, TENSOR),
    (expert_cases, {"expert_model_parallel_size": 2}),
    (pipeline_cases, {"pipeline_model_parallel_size": 2}),
)


def worker(rank: int, port: int, folder: str) -> None:
    engine.start(rank, 2, port)
    found: dict[str, float] = {}
    for cases, sizes in CASES:
        engine.regroup(**sizes)
        found |= cases(rank)
    engine.stop()
    torch.save(found, Path(folder) / f"{rank}.pt")


def test_ranks_are_exact(tmp_path: Path) -> None:
    for errors in run_ranks(__name__, tmp_path, seconds=200):
        assert len(errors) == 18
        assert {case: error for case, error in errors.items() if not error < FLOAT64} == {}
