"""Inputs of the call that require grad: each row has its own gradient, for any shared tokens."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import compile_with
from tests.batches import distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, stats_of
from tests.spellings import PADDED

BATCH = shared_batch(rows=4, length=14, shared=6, vocab=61)
WIDTH = 16


class Steered(nn.Module):
    """A tiny model whose embeddings go through ``steer(x, extra)`` and whose logits through ``tail(logits, extra)``."""

    def __init__(self, steer: Callable[[Tensor, Tensor], Tensor], tail: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = TinyLM(PADDED["additive_padding"], layers=1, width=WIDTH)
        self.steer, self.tail = steer, tail

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, extra: Tensor) -> Tensor:
        model = self.inner
        x = self.steer(model.embed(ids) + model.place(torch.arange(ids.shape[1])), extra)
        hidden = model.norm(model.blocks[0](x, mask))
        logits = self.tail(model.head(hidden), extra)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def keep(x: Tensor, extra: Tensor) -> Tensor:
    return x


def gradients(model: nn.Module, run: Any, extra: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    given = extra.clone().requires_grad_()
    loss = run(BATCH.input_ids, BATCH.attention_mask, BATCH.labels, given)
    loss.backward()
    return [loss.detach(), given.grad, *(p.grad for p in model.parameters())]


def check(model: nn.Module, extra: Tensor, inner: str = "eager") -> dict[str, Any]:
    """The statistics of a call whose gradients are eager's, those of the input too, twice."""
    reference, twin = model.double(), copy.deepcopy(model)
    compiled = compile_with(twin, inner=inner)
    wanted = gradients(reference, reference, extra)
    for _ in range(2):
        got = gradients(twin, compiled, extra)
        for left, right in zip(got, wanted, strict=True):
            assert float((left - right).abs().max()) <= FLOAT64 * float(right.abs().max()) + 1e-16
    return stats_of(compiled)


PER_ROW = {
    "gate of every position": (lambda x, g: x * g[..., None], torch.ones(4, 14)),
    "gate of every row": (lambda x, g: x * g[:, None, None], torch.ones(4)),
    "gate of every feature": (lambda x, g: x * g, torch.ones(4, 14, WIDTH)),
    "prompt of every row": (lambda x, g: x + g, torch.zeros(4, 1, WIDTH)),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_gradients_per_row(name: str) -> None:
    """Ones and zeros are equal in all rows, and so are the shared tokens; the gradients are not."""
    steer, extra = PER_ROW[name]
    stats = check(Steered(steer, keep), extra.double(), "aot_eager" if extra.dim() == 1 else "eager")
    assert stats["tokens"] == 4 * 14 or "requires grad" in stats["fallback"], stats


def test_values_alone_are_shared() -> None:
    """The same gate without a gradient distinguishes tokens by its values, and its rows share."""
    steer, gate = PER_ROW["gate of every position"]
    model = Steered(steer, keep).double()
    compiled = compile_with(model, inner="eager")
    compiled(BATCH.input_ids, BATCH.attention_mask, BATCH.labels, gate.double()).backward()
    assert stats_of(compiled)["tokens"] == distinct_tokens(BATCH)


FOR_ALL = {
    "a number": (lambda x, g: x * g, torch.tensor(1.5)),
    "a value per column": (lambda x, g: x * g[..., None], torch.linspace(0.5, 2.0, 14)[None]),
    "a value per feature": (lambda x, g: x + g, torch.linspace(0.5, 2.0, WIDTH)[None, None]),
}


@pytest.mark.parametrize("name", FOR_ALL)
def test_what_all_rows_share_stays_packed(name: str) -> None:
    """One gradient for all rows is a sum over them, like that of a parameter."""
    steer, extra = FOR_ALL[name]
    inner = "aot_eager" if extra.dim() == 2 else "eager"
    assert check(Steered(steer, keep), extra.double(), inner)["tokens"] == distinct_tokens(BATCH)


@pytest.mark.parametrize(
    "extra", [torch.tensor(0.7), torch.ones(4, 1, 1), torch.ones(4, 14, 1)], ids=["number", "per row", "per position"]
)
def test_temperatures_of_the_logits(extra: Tensor) -> None:
    """Behind the model each row may have its own: it is packed up to there."""
    inner = "aot_eager" if extra.shape[1:] == (1, 1) else "eager"
    stats = check(Steered(keep, lambda logits, g: logits / g), extra.double(), inner)
    assert stats["tokens"] < 4 * 14 and stats["fallback"] is None


def test_embeddings_made_outside() -> None:
    """Soft prompts in front of ``inputs_embeds``: no token ids enter the graph, and every row runs."""

    class OnEmbeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Steered(keep, keep).inner

        def forward(self, x: Tensor) -> Tensor:
            model = self.inner
            mask = torch.ones(x.shape[:2], dtype=torch.int64)
            return model.head(model.norm(model.blocks[0](x, mask))).square().mean()

    model = OnEmbeddings().double()
    results = []
    for run in (model, compile_with(copy.deepcopy(model), inner="eager")):
        prompt = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        x = torch.cat([prompt.expand(4, 2, WIDTH), model.inner.embed(BATCH.input_ids).detach()], 1)
        run(x).backward()
        results.append(prompt.grad)
    torch.testing.assert_close(*results, rtol=1e-10, atol=0)
