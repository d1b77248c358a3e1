"""What Dynamo traces in one graph, and how often, where treefx compiles."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers.utils.import_utils import torch_compilable_check

from tests.backend.small import Small
from tests.batches import shared_batch
from tests.oracle import loss_of, stats_of
from tests.spellings import SPELLINGS

_log = logging.getLogger(__name__)


def tiny() -> Small:
    return Small(SPELLINGS["sdpa_is_causal"]).double()


class Warned(nn.Module):
    """As transformers is where a model has no type of loss; its import gives loggers the method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        logits = self.inner(**inputs).logits
        _log.warning_once("no type of loss")  # type: ignore[attr-defined]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_warning_between_logits_and_loss_cuts_nothing() -> None:
    compiled = torch.compile(Warned(), backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    counters.clear()
    compiled(**shared_batch(rows=3, length=8, shared=4, vocab=61).inputs()).backward()
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert stats_of(compiled)["ran"] == "packed"


def test_the_module_of_a_class_is_a_text() -> None:
    """As PEFT finds out whether a weight is quantised."""
    layer = nn.Linear(2, 2)

    def scaled(x: Tensor) -> Tensor:
        return x * (2 if type(layer.weight).__module__.startswith("torch.nn") else 3)

    counters.clear()
    compiled = torch.compile(scaled, backend="treefx", options={"inner": "eager"})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and not counters["graph_break"]


def test_a_check_of_selected_elements_cuts_nothing() -> None:
    """It counts the elements under masks of fewer dimensions too; elsewhere the count stays a number."""

    def checked(x: Tensor, mask: Tensor, vectors: Tensor) -> Tensor:
        torch_compilable_check(x[mask].numel() == vectors.numel(), f"{mask.sum()} tokens, {vectors.shape[0]} vectors")
        return x * 2

    compiled = torch.compile(checked, backend="treefx", options={"inner": "eager"})
    x, mask, counts = torch.ones(2, 3, 4), torch.eye(2, 3) > 0, []
    counters.clear()
    for given in (mask, mask.unsqueeze(-1).expand_as(x)):
        assert torch.equal(compiled(x, given, torch.ones(2, 4)), x * 2)
        with pytest.raises(RuntimeError, match="expected as many tokens of images"):
            compiled(x, given, torch.ones(3, 4))
    assert not counters["graph_break"], dict(counters["graph_break"])
    counted = torch.compile(lambda: counts.append(x[mask].numel()), backend="treefx", options={"inner": "eager"})
    counted()
    assert counts == [8] and type(counts[0]) is int


def test_another_number_of_rows_compiles_nothing() -> None:
    """After a batch of another length: PyTorch alone takes the sizes for symbols that it has seen change."""
    graphs = {}
    for backend, options in (("treefx", {"inner": "eager"}), ("eager", None)):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(tiny(), backend=backend, options=options)
        for rows, length in ((2, 8), (2, 10), (3, 10), (5, 12)):
            loss_of(shared_batch(rows=rows, length=length, shared=4, vocab=61, padding=None))(compiled)
        graphs[backend] = counters["stats"]["unique_graphs"]
    assert graphs == {"treefx": 2, "eager": 3}
