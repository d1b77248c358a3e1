"""Images between tokens: rows share them where ids, columns and pixels agree, and the tower gets its whole gradient.

The gradient of a shared vector is the sum over its rows, and goes into the vector of one of them. For the parameters of
the tower that is exact: equal pixels through one function have equal derivatives, so that which copy is derived does
not matter. For pixels and vectors that the caller wants gradients of it would not be, and these are never shared.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import treefx
from tests.backend.models.vision import CASES, IMAGE, PATCHES, TinyVLM, distinct, draw_images, gemma3, llava, rows_of
from tests.backend.small import stripped
from tests.backend.support import Pair, assert_packed, compare, compile_with, in_case
from tests.batches import IGNORED, Batch, Side, padded
from tests.models import TinyLM
from tests.oracle import FLOAT64, Step, assert_close, outcome, stats_of
from tests.spellings import SPELLINGS
from treefx.passes import pipeline
from treefx.passes.trace.token_types import read_types_as_zeros
from treefx.passes.trace.trace import NAME
from treefx.runtime import padding, places

OWN = "an image per row"


def batch_of(case: str, side: Side = "right") -> tuple[Batch, str]:
    """Rows of different lengths, and the names of their images."""
    rows, names = CASES[case]
    whole = rows_of(rows)
    return padded([row[: len(row) - b % 2] for b, row in enumerate(whole)], side), names


def step_of(batch: Batch, pixels: Tensor | None) -> Step:
    """A call of a `TinyVLM`; images are never predicted."""
    assert batch.labels is not None
    labels = batch.labels.masked_fill(batch.input_ids == IMAGE, IGNORED)
    given = {} if pixels is None else {"pixels": pixels}
    return lambda model: model(batch.input_ids, batch.attention_mask, labels, **given)


def check(model: nn.Module, case: str, inner: str = "eager") -> dict[str, Any]:
    batch, names = batch_of(case)
    step = step_of(batch, draw_images(names) if names else None)
    return compare(model.double(), step, inner=inner).stats


@pytest.mark.parametrize("listed", [False, True], ids=["tensor", "list"])
def test_cases(listed: bool) -> None:
    """Four kinds of batches on one compiled object, padded on either side, loss and all gradients.

    Where images are listed one by one, their number is in the graph: batches of four.
    """
    pair = Pair(TinyVLM(listed=listed).double())
    for case in ("one image per group", OWN) if listed else CASES:
        for side in ("right", "left") if case == OWN else ("right",):
            batch, names = batch_of(case, side)
            with in_case(f"{case}, {side}"):
                checked = pair.check(step_of(batch, draw_images(names) if names else None))
                assert_packed(checked, distinct(batch, names), layers=1)


def test_llava() -> None:
    """The check of transformers between embeddings and layers cuts nothing."""
    pair = Pair(llava())
    for case in ("text alone", OWN):
        batch, names = batch_of(case)
        given = {"pixel_values": draw_images(names)} if names else {}
        assert batch.labels is not None
        labels = batch.labels.masked_fill(batch.input_ids == IMAGE, IGNORED)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": labels, **given}
        with in_case(case):
            checked = pair.check(lambda model: model(**inputs, use_cache=False).loss)
            assert_packed(checked, distinct(batch, names), layers=1)
            assert len(treefx.inspect(pair.compiled).graphs) and not checked.stats["expansions"]
            assert not names or (checked.stats["images"], checked.stats["images_run"]) == (len(names), len({*names}))


def test_llava_with_too_few_images() -> None:
    """The number of vectors is checked as in eager mode."""
    batch, names = batch_of(OWN)
    inputs = {"input_ids": batch.input_ids, "pixel_values": draw_images(names[:3]), "use_cache": False}
    model = llava()
    with pytest.raises(ValueError, match="do not match"):
        model(**inputs)
    with pytest.raises(RuntimeError, match="expected"):
        compile_with(model)(**inputs)


def gemma3_step(batch: Batch, names: str) -> Step:
    """As trainers call Gemma 3: with types of tokens, in batches of text too."""
    assert batch.labels is not None
    images = batch.input_ids == IMAGE
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "token_type_ids": images.long()}
    given = {"pixel_values": draw_images(names)} if names else {}
    labels = batch.labels.masked_fill(images, IGNORED)
    return lambda model: model(**inputs, **given, labels=labels, use_cache=False).loss


def test_gemma3() -> None:
    """Types that are zero throughout leave attention causal; blocks of image tokens see each other.

    One block of two images is shared whole or not at all.
    """
    pair = Pair(gemma3())
    for case in ("text alone", OWN, "two images, one shared"):
        batch, names = batch_of(case)
        with in_case(case):
            checked = pair.check(gemma3_step(batch, names))
            assert_packed(checked, distinct(batch, names), layers=2)
            assert not names or checked.stats["images_run"] == len({*names})
    batch = padded(rows_of([[1, 2, -1, -1, 5, last] for last in (10, 12, 14)]))
    with in_case("images side by side"):
        assert_packed(pair.check(gemma3_step(batch, "ababac")), distinct(batch, "ababac") + PATCHES, layers=2)


def test_types_that_are_not_zero_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for zeros all the same, they hide from an image token those behind it in its block."""
    original = pipeline.read_types_as_zeros

    def read(gm: Any, zero: Any) -> None:
        original(gm, range(len(gm.graph.find_nodes(op="placeholder"))))

    monkeypatch.setattr(pipeline, "read_types_as_zeros", read)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(gemma3(), gemma3_step(*batch_of(OWN)))


@pytest.mark.parametrize("zeros", [True, False])
def test_a_choice_by_types_that_are_zero_is_one_number(zeros: bool) -> None:
    """Blocks counted along columns (Gemma 4) are none in text; a choice by other types, or of counts, stays."""

    def blocks(types: Tensor) -> tuple[Tensor, ...]:
        images = (types == 1) | (types == 2)
        counts = (images & ~images.roll(1, -1)).int().cumsum(1)
        return torch.where(images, counts, -1), torch.where(~images, counts, -1)

    gm = make_fx(blocks)(torch.zeros(2, 5, dtype=torch.int64))
    gm.graph.find_nodes(op="placeholder")[0].meta[NAME] = "mm_token_type_ids"
    read_types_as_zeros(gm, [0] if zeros else [])
    gm.recompile()
    first, second = gm.graph.find_nodes(op="output")[0].args[0]
    assert (first.target is torch.ops.aten.full.default) == zeros and second.target is torch.ops.aten.where.self
    ones = torch.ones(2, 5, dtype=torch.int64)
    for found, right in zip(gm(ones), blocks(ones * 0 if zeros else ones), strict=True):
        assert torch.equal(found, right)


def test_inductor() -> None:
    """Behind a frozen tower, whose vectors are multiplied by a parameter: an adapter."""

    class Adapted(TinyVLM):
        def __init__(self) -> None:
            super().__init__()
            stripped(self.text)

        def see(self, pixels: Tensor) -> Tensor:
            return self.project(pixels.flatten(1)[:, :64].unflatten(-1, (4, 16)))

    batch, names = batch_of("two images, one shared")
    stats = check(Adapted(), "two images, one shared", "inductor")
    assert stats["fallback"] is None and stats["tokens"] == distinct(batch, names) < stats["raw_tokens"]


def test_a_trie_of_ids_alone_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "number_places", lambda law, images, value, sizes: value(law.mask)[..., 0].long())
    check(TinyVLM(), "one image per group")
    with pytest.raises(AssertionError, match="differ by more than"):
        check(TinyVLM(), OWN)


def test_equal_vectors_of_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """All vectors are the bias of a projection that starts at zero, but its gradient needs the images' own."""
    batch, names = batch_of(OWN)
    assert check(TinyVLM(zero=True), OWN)["tokens"] == distinct(batch, names)
    monkeypatch.setattr(places, "_number_images", lambda inputs: torch.zeros(len(inputs[0]), dtype=torch.int64))
    with pytest.raises(AssertionError, match="project.weight") as error:
        check(TinyVLM(zero=True), OWN)
    assert "loss" not in str(error.value)  # bits of the vectors would not show it


def test_images_that_are_mixed_share_up_to_the_first() -> None:
    """Their vectors are no function of one image: each place stands for itself, the text before is shared."""
    batch, names = batch_of("one image per group")
    stats = check(TinyVLM(mixed=True), "one image per group")
    assert stats["fallback"] is None and not stats["expansions"]
    assert stats["tokens"] == 2 + sum(len(row) - 2 for row in batch.rows()) > distinct(batch, names)


def test_all_that_is_given_with_an_image_tells_it_apart() -> None:
    """A number per image too, whose fraction alone differs."""

    class Scaled(TinyVLM):
        scale: Tensor

        def see(self, pixels: Tensor) -> Tensor:
            return super().see(pixels) * self.scale[:, None, None]

        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, pixels: Any = None, scale: Any = None) -> Tensor:
            self.scale = scale
            return super().forward(ids, mask, labels, pixels)

    batch, names = batch_of("one image per group")
    step = step_of(batch, draw_images(names))
    scale = torch.tensor([0.5, 0.75, 0.5, 0.75]).double()
    checked = compare(Scaled().double(), lambda model: step(lambda *given, **more: model(*given, **more, scale=scale)))
    assert_packed(checked, distinct(batch, "abab"))


@pytest.mark.parametrize("given", ["pixels", "vectors"])
def test_gradients_of_what_the_caller_gives(given: str) -> None:
    """Pixels or vectors that require grad have a gradient for each image, however equal they are."""
    model, (batch, names) = TinyVLM().double(), batch_of("one image per group")
    twin = copy.deepcopy(model)
    compiled = compile_with(twin)
    values = draw_images(names) if given == "pixels" else model.see(draw_images(names)).detach()
    found = []
    for run in (model, compiled):
        x = values.clone().requires_grad_()
        loss = step_of(batch, x)(run)
        loss.backward()
        found.append([loss.detach(), x.grad])
    for right, left in zip(*found, strict=True):
        assert float((left - right).abs().max()) <= FLOAT64 * float(right.abs().max())
    assert distinct(batch, names) < stats_of(compiled)["tokens"] < stats_of(compiled)["raw_tokens"]


def test_vectors_of_the_caller_alone_are_shared() -> None:
    """Frozen features come with the batch and are compared by their bits."""
    model, (batch, names) = TinyVLM().double(), batch_of(OWN)
    checked = compare(model, step_of(batch, model.see(draw_images(names)).detach()))
    assert_packed(checked, distinct(batch, names))


def test_too_few_images() -> None:
    batch, names = batch_of(OWN)
    model = TinyVLM().double()
    step = step_of(batch, draw_images(names[:2]))
    with pytest.raises(RuntimeError):
        step(model)
    with pytest.raises(RuntimeError, match="vector"):
        step(compile_with(copy.deepcopy(model)))


def test_a_forest_in_use_is_refused() -> None:
    class OnIds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyVLM()
            self.inner.text = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16)

        def forward(self, input_ids: Tensor, position_ids: Tensor, pixels: Tensor) -> Tensor:
            model = self.inner.text
            x = model.embed(input_ids)
            x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), self.inner.see(pixels))
            hidden = model.norm(model.blocks[0](x + model.place(position_ids), None))
            return model.head(hidden)

    forest = treefx.Forest.from_sequences(rows_of(CASES[OWN][0]))
    with treefx.use(forest), pytest.raises(Exception, match="vectors of images are given for the rows"):
        compile_with(OnIds().double())(**forest.model_inputs(), pixels=draw_images("a"))


def test_converted_models_run_images_on_rows() -> None:
    """Exact, and the report names the input or the attention, and the way out; Gemma 3 has no module to convert."""
    model, converted = llava(), treefx.convert(llava(), min_sharing=1.0)

    def check(case: str) -> str:
        batch, names = batch_of(case)
        inputs = batch.inputs() | ({"pixel_values": draw_images(names)} if names else {})
        expected, got = (outcome(x, lambda x=x: x(**inputs, use_cache=False).loss) for x in (model, converted))
        assert_close(got, expected, FLOAT64)
        return str(stats_of(converted)["fallback"])

    with pytest.warns(treefx.SharingWarning, match=r"pixel_values.*torch\.compile\(model"):
        assert "pixel_values" in check(OWN)
    text = check("text alone")
    assert "vision_tower" in text and "torch.compile(model" in text
    with pytest.raises(treefx.TreefxError, match="compile the whole model with backend='treefx'"):
        treefx.convert(gemma3())
