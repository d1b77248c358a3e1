"""torchtune's decoders under ``treefx run``: one graph with ids and head, as exact as torchtune without a compiler."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close, outcome, stats_of
from tests.trainers.torchtune import tune
from treefx.integrations.torchtune import compile_whole

MM = torch.ops.aten.mm.default
STEM = [5, 6, 7, 8, 9, 10, 11]


def conversation(seed: int, last: int = 31, turns: int = 3) -> dict[str, Tensor]:
    """Turns of one, each with all before it, the shortest first."""
    draw = torch.Generator().manual_seed(seed)
    said = torch.randint(3, 23, (last,), generator=draw).tolist()
    return tune.collate([[*STEM, *said][: last * turn // turns] for turn in range(1, turns + 1)])


def compiled(model: Any, **options: Any) -> Any:
    """As recipes do it: checkpoints and chunks come after the compiler."""
    module = tune.compile_module()
    compile_whole(module, {"inner": "eager", **options})
    compile_whole(module)  # once
    module.compile_model(model)
    return model


def step(model: nn.Module, chunks: int, batch: dict[str, Tensor]) -> Outcome:
    """Loss and gradients by the names that parameters have without checkpoints."""
    decoder: Any = model.decoder if isinstance(model, tune.Fusion) else model
    decoder.set_num_output_chunks(chunks)
    loss = tune.Loss(chunks) if chunks else nn.CrossEntropyLoss(ignore_index=tune.IGNORED)
    got = outcome(model, lambda: tune.loss_of_step(model, loss, batch))
    bare = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in got.gradients.items()}
    return Outcome(got.loss, bare)


def packs_head(model: nn.Module) -> bool:
    """Whether the graph on distinct tokens multiplies by the head."""
    products = [node for node in treefx.inspect(model).graphs["rewritten"].graph.nodes if node.target is MM]
    return any(node.meta["val"].shape[-1] == tune.VOCAB for node in products)


@pytest.mark.parametrize(("chunks", "inside"), [(8, True), (0, False)])
def test_a_recipe_s_steps_are_exact_and_all_of_them_shared(chunks: int, inside: bool) -> None:
    """Three lengths, checkpoints, the loss in chunks: one graph, compiled once, with nothing but logits on rows."""
    plain: Any = tune.Fusion(tune.decoder()) if inside else tune.decoder()
    model = tune.checkpointed(compiled(copy.deepcopy(plain)))
    for seed, last in enumerate((31, 60, 43)):
        batch = conversation(seed, last)
        assert_close(step(model, chunks, batch), step(plain, chunks, batch), FLOAT64)
    stats = stats_of(model)
    assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
    assert (stats["graphs"], stats["compiles"], stats["calls"]) == (1, 1, 3)
    assert stats["sharing_ratio"] > 1.3 and packs_head(model)


def test_torchtune_s_own_chunks_would_keep_the_head_on_rows() -> None:
    """Why the hook replaces them."""
    model = compiled(tune.decoder())
    del model.chunked_output
    step(model, 8, conversation(0))
    assert stats_of(model)["ran"] == "packed" and not packs_head(model)


@pytest.mark.parametrize("chunks", [0, 5])
def test_hidden_states_come_before_logits(chunks: int) -> None:
    """For a model that is asked for them, and for one whose call is not compiled after all."""
    tokens = conversation(0)["tokens"]
    plain = tune.decoder()
    model = compiled(copy.deepcopy(plain))
    for decoder in (plain, model):
        decoder.set_num_output_chunks(chunks)
        decoder.output_hidden_states = [1]
    expected = plain(tokens)
    copied = copy.deepcopy(model)  # as it was, without the compiler
    for got in (model(tokens), copied(tokens), torch.compiler.set_stance("force_eager")(model)(tokens)):
        assert len(got) == 2
        torch.testing.assert_close(got, expected, rtol=FLOAT64, atol=FLOAT64)
    assert isinstance(expected[1], list) == bool(chunks)


def packs(masked: bool) -> dict[str, Tensor]:
    """Two packs of three conversations each, as the collation of packed datasets hands them over without a GPU."""
    rows = [[*STEM, 3, 4, 5], [*STEM, 6, 7], [*STEM, 3, 8]]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths.tolist())).bool()
    batch = tune.collate([[token for row in order for token in row] for order in (rows, rows)])
    places = torch.cat([torch.arange(n) for n in lengths.tolist()])
    return {**batch, "input_pos": places.expand(2, -1), **({"mask": mask.expand(2, -1, -1)} if masked else {})}


@pytest.mark.parametrize(("masked", "distinct"), [(True, 13), (False, 28)])
def test_masks_and_positions_that_the_decoder_is_given_are_kept(masked: bool, distinct: int) -> None:
    """Of packed datasets. Without the mask, conversations see those before them: only the two equal rows are shared."""
    plain, model, batch = tune.decoder(), compiled(tune.decoder()), packs(masked)
    assert_close(step(model, 8, batch), step(plain, 8, batch), FLOAT64)
    assert (stats_of(model)["tokens"], stats_of(model)["fallback"]) == (distinct, None)


@pytest.mark.parametrize("named", ["treefx", "eager"])
def test_a_backend_that_the_environment_names_stays(
    named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", named)
    model = compiled(tune.decoder())
    others = [layer._compiled_call_impl is not None for layer in model.layers]
    if named == "eager":
        assert "the backend it names, eager" in caplog.text
        assert model._compiled_call_impl is None and all(others)
    else:
        assert model._compiled_call_impl is not None and not any(others)


def test_a_model_whose_decoder_gets_no_ids_is_compiled_as_torchtune_does(caplog: pytest.LogCaptureFixture) -> None:
    """``EarlyFusionModel``: its decoder gets embeddings, in which those of images are."""

    class EarlyFusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = tune.decoder()

    model = compiled(EarlyFusion())
    assert "EarlyFusion is compiled by layers, which get no ids" in caplog.text
    assert all(layer._compiled_call_impl is not None for layer in model.decoder.layers)
    assert model._compiled_call_impl is None and model.decoder._compiled_call_impl is None
