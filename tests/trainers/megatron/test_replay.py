"""Megatron's routers that replay recorded experts: routes tell tokens apart, and are recorded for every position."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import treefx
from tests.oracle import FLOAT64
from tests.trainers.megatron import engine, routes
from treefx.errors import UnsupportedError
from treefx.integrations.megatron import conversion, convert, replay, unconvert

pytest.importorskip("megatron.core.transformer.moe.router_replay", reason="needs megatron-core 0.16")

ROWS = engine.rows_of(4, 2, 3)
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
COUNTED: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with engine.one_rank():
        yield


def tokens(model: Any) -> int:
    found = treefx.inspect(model).stats
    assert found["ran"] == "packed"
    return int(found["tokens"])


@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_replayed_rows_are_as_separate_rows(options: dict[str, Any]) -> None:
    """In both forms of calls; a row whose routes differ shares up to there."""
    given = routes.draw(ROWS)
    want = routes.separately(routes.model(), ROWS, given)
    model = convert(routes.model(**options))
    for step in (routes.packed, routes.padded):
        assert engine.differ(step(model, ROWS, given), want) < FLOAT64
    alike = routes.distinct(ROWS, [torch.zeros(len(row), 1) for row in ROWS])
    routes.packed(model, ROWS, given)
    assert tokens(model) == routes.distinct(ROWS, given) > alike


@pytest.mark.parametrize("counted", [False, True], ids=["token by token", "losses of experts"])
def test_drawn_routes(counted: bool) -> None:
    """Of a batch whose routers may count its tokens, against the model before; then without routes."""
    model = routes.model(**(COUNTED if counted else {}))
    plain = engine.padded(model, ROWS)
    for seed in range(3):
        given = routes.draw(ROWS, seed)
        want = routes.padded(unconvert(model), ROWS, given)
        assert engine.differ(routes.padded(convert(model), ROWS, given), want) < FLOAT64 and tokens(model)
    routes.set_action(None)
    assert engine.differ(engine.padded(model, ROWS), plain) < FLOAT64


@pytest.mark.parametrize("counted", [False, True], ids=["token by token", "losses of experts"])
def test_routes_are_recorded_for_every_position(counted: bool) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    recorded: list[list[Tensor]] = []
    for change in (convert, unconvert):
        model = change(routes.model(**(COUNTED if counted else {})))
        routes.set_action("record")
        engine.padded(model, ROWS)
        recorded.append(RouterReplay.get_recorded_data())
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ROWS]).flatten() > 0
    assert len(recorded[0]) == routes.LAYERS
    for got, want in zip(*recorded, strict=True):
        assert torch.equal(got[mask], want[mask]) and got.shape == want.shape


# Wrong on purpose -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["ids alone", "routes of the first positions"])
def test_a_plausible_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "ids alone":
        monkeypatch.setattr(conversion, "routes_to_replay", lambda *_: None)
    else:
        monkeypatch.setattr(replay, "_of_positions", _first)
    given = routes.draw(ROWS)
    want = routes.separately(routes.model(), ROWS, given)
    assert engine.differ(routes.padded(convert(routes.model()), ROWS, given), want) > 1e-3


def _first(given: Tensor, tree: Any) -> Tensor:
    """The first N routes for the N tokens."""
    shifted = given.clone()
    shifted[tree.first_N] = given[: len(tree.first_N)]
    return shifted


# Refused, or as it came -----------------------------------------------------------------------------------------------


def test_pipeline_stages_do_not_know_each_others_routes() -> None:
    model = routes.model()
    model.config.pipeline_model_parallel_size, model.config.variable_seq_lengths = 2, True
    with pytest.raises(UnsupportedError, match="replays routes.*pipeline_model_parallel_size=1"):
        convert(model)


def test_fused_routing_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded before stays, for a call that passes the recording by."""
    model = convert(routes.model())
    routes.set_action("record")
    before = torch.arange(routes.CHOSEN)[None].expand(60, -1)
    for router in routes.routers(model):
        router.router_replay.recorded_topk_idx = before
        monkeypatch.setattr(router.router_replay, "record_indices", lambda chosen: None)
    engine.padded(model, ROWS)
    assert tokens(model) and all(router.router_replay.recorded_topk_idx is before for router in routes.routers(model))


def test_further_tensors_leave_the_call_as_it_came() -> None:
    model = convert(routes.model())
    routes.routers(model)[1].router_replay.replay_mask = torch.ones(3)
    with pytest.warns(UserWarning, match="router replay holds 'replay_mask'"):
        engine.padded(model, ROWS)
    assert treefx.inspect(model).stats["ran"] == "ordinary"


def test_routes_of_another_batch_leave_the_call_as_it_came() -> None:
    model = convert(routes.model())
    longer = [*ROWS, ROWS[0]]
    routes.hand_out(torch.stack(routes.filled(routes.draw(longer), 20), 1))
    ids = torch.nn.utils.rnn.pad_sequence(ROWS, True)
    with pytest.warns(UserWarning, match="replay routes"), pytest.raises(RuntimeError):  # of Megatron
        model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
