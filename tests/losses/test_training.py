"""One step of a compiled model on a tree: loss and gradients of all parameters of the textbook's step on rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.native import TakesCacheFlag
from tests.losses.every_loss import ADVANTAGES, FOREST, OLD, OLD_ROWS, PAIRS, REF, ROWS, WEIGHTS
from tests.losses.textbook import Values, reduce_tokens
from tests.models import TinyLM
from tests.oracle import FLOAT64, Outcome, assert_close, compile_with, outcome
from tests.spellings import SPELLINGS
from treefx import losses

MASKS = [torch.tensor(weight, dtype=torch.float64)[1:] for weight in WEIGHTS]
TEMPERATURE = 0.8


def rows_of(values: Tensor) -> Values:
    """[E] as a vector [T - 1] per row."""
    by_token = torch.zeros(FOREST.num_tokens, dtype=torch.float64)
    by_token[FOREST.edges.target] = values
    return [by_token[index][1:] for index in FOREST.token_of]


def grpo_on_rows(logp: Values, entropies: Values) -> Tensor:
    """Clipped, with a k3 penalty and an entropy bonus, mean over rows."""
    values = []
    for p, h, o, r, a in zip(logp, entropies, [row[1:] for row in OLD_ROWS], rows_of(REF), ADVANTAGES, strict=True):
        ratio = (p - o).exp()
        gain = torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a)
        values.append(-gain + 0.2 * (torch.exp(r - p) - (r - p) - 1) - 0.1 * h)
    return reduce_tokens(values, MASKS, "row_mean")


def grpo_on_edges(logp: Tensor, entropies: Tensor) -> Tensor:
    loss = losses.clipped(logp, FOREST, OLD_ROWS, ADVANTAGES, (0.1, 0.3), "row_mean")
    loss = loss + 0.2 * losses.kl(logp, FOREST, REF, "k3", "row_mean")
    return loss - 0.1 * losses.entropy(entropies, FOREST, "row_mean")


def gspo_on_rows(logp: Values, entropies: Values) -> Tensor:
    found = []
    for p, o, m, a in zip(logp, rows_of(OLD), MASKS, ADVANTAGES, strict=True):
        ratio = ((m * (p - o)).sum() / m.sum().clamp(min=1e-9)).exp()
        found.append(-torch.minimum(ratio * a, ratio.clamp(0.95, 1.05) * a) * (m.sum() > 0))
    return torch.stack(found).mean()


def gspo_on_edges(logp: Tensor, entropies: Tensor) -> Tensor:
    return losses.clipped(logp, FOREST, OLD, ADVANTAGES, 0.05, "row_mean", level="sequence")


def dpo_on_rows(logp: Values, entropies: Values) -> Tensor:
    ratio = [(m * (p - r)).sum() for p, r, m in zip(logp, rows_of(REF), MASKS, strict=True)]
    return torch.stack([torch.log1p(torch.exp(-0.1 * (ratio[w] - ratio[r]))) for w, r in PAIRS]).mean()


def dpo_on_edges(logp: Tensor, entropies: Tensor) -> Tensor:
    return losses.dpo(logp, FOREST, REF, PAIRS)


def on_rows(model: nn.Module, loss: Callable[[Values, Values], Tensor]) -> Outcome:
    """Every row is a separate batch."""

    def step() -> Tensor:
        logp, entropies = [], []
        for row in ROWS:
            ids = torch.tensor(row)
            found = (model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            logp.append(found.gather(-1, ids[1:, None])[:, 0])
            entropies.append(-(found.exp() * found).sum(-1))
        return loss(logp, entropies)

    return outcome(model, step)


def on_tree(model: nn.Module, compiled: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> Outcome:
    def step() -> Tensor:
        with treefx.use(FOREST):
            logits = compiled(**FOREST.model_inputs(), use_cache=False).logits
        read = (treefx.edge_logprobs, treefx.edge_entropy)
        return loss(*(function(logits, FOREST, TEMPERATURE) for function in read))

    return outcome(model, step)


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1)).double()
    twin = copy.deepcopy(model)
    return model, twin, compile_with(twin)


@pytest.mark.parametrize(
    ("rows", "edges"),
    [(grpo_on_rows, grpo_on_edges), (gspo_on_rows, gspo_on_edges), (dpo_on_rows, dpo_on_edges)],
    ids=["grpo", "gspo", "dpo"],
)
def test_a_step_on_the_tree_is_the_step_on_rows(
    models: tuple[nn.Module, nn.Module, Any], rows: Any, edges: Any
) -> None:
    model, twin, compiled = models
    assert_close(on_tree(twin, compiled, edges), on_rows(model, rows), FLOAT64)


def test_another_temperature_is_told_apart(
    models: tuple[nn.Module, nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin, compiled = models
    expected = on_rows(model, dpo_on_rows)
    monkeypatch.setattr("tests.losses.test_training.TEMPERATURE", 1.0)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_close(on_tree(twin, compiled, dpo_on_edges), expected, 1e-3)
