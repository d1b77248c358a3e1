"""Operators of laws along tokens, where they mix a row's positions: each runs on rows, by name, and stays exact."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.small import Small
from tests.batches import shared_batch
from tests.models import Output
from tests.oracle import compare
from tests.spellings import SPELLINGS

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.linalg_vector_norm.default": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "aten.amax.default": lambda x: x.amax(1, keepdim=True),
    "aten.var.correction": lambda x: x.var(1, keepdim=True),
    "aten.argmax.default": lambda x: x.detach().argmax(1, keepdim=True).to(x.dtype),
    "aten.logsumexp.default": lambda x: x.logsumexp(1, keepdim=True),
    "aten._softmax.default": lambda x: x.softmax(1),
    "aten.flip.default": lambda x: x.flip(1),
    "aten.roll.default": lambda x: x.roll(2, 1),
    "aten.sort.default": lambda x: x.sort(1)[0],
    "aten.topk.default": lambda x: x.topk(2, 1)[0].sum(1, keepdim=True),
    "aten.kthvalue.default": lambda x: x.kthvalue(2, 1, keepdim=True)[0],
    "aten.median.dim": lambda x: x.median(1, keepdim=True)[0],
    "aten.nansum.default": lambda x: x.nansum(1, keepdim=True),
    "aten.cummin.default": lambda x: x.flip(2).cummin(1)[0],
    "aten.gather.default": lambda x: x.gather(1, x.detach().argsort(2)[:, :1] % 3),
    "aten.index_select.default": lambda x: x.index_select(1, torch.tensor([1])),
    "aten.index_add.default": lambda x: x.index_add(1, torch.tensor([0, 1]), x[:, :2]),
    "aten.tril.default": lambda x: x.tril(),
}
"""By what the report names."""


class _Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum(0.1 * mix(x) for mix in MIXING.values())


def test_what_mixes_tokens_runs_on_rows() -> None:
    model = Small(SPELLINGS["sdpa_is_causal"], after=_Mixed()).double()
    checked = compare(model, shared_batch(rows=3, length=7, shared=3, vocab=61, padding=None), inner="eager")
    assert checked.stats["fallback"] is None
    assert {item["op"] for item in checked.stats["expansions"]} >= set(MIXING)


class _FewClasses(Small):
    """The loss is over some of the classes of the shifted logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Tensor) -> Output:
        found = super().forward(input_ids)
        assert labels is not None
        logits = found.logits[:, :-1][..., 5:45]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten() % 40)
        return Output(loss, found.logits, found.hidden)


def test_a_slice_of_classes_is_none_of_tokens() -> None:
    model = _FewClasses(SPELLINGS["sdpa_is_causal"]).double()
    for rows, length in ((3, 7), (4, 9)):
        batch = shared_batch(rows=rows, length=length, shared=3, vocab=61, padding=None)
        assert compare(model, batch, inner="eager").stats["attention_rewritten"] == 1
