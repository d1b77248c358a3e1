"""Losses as papers write them, one row at a time, in plain torch; and random batches to compare on.

Nothing here knows of edges: every row has its own copy of its logits, its own terms and its own mean.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import Rows, row_batches
from treefx import Forest, edge_logprobs, losses
from treefx.forests.input import Weighting
from treefx.forests.subset import EdgeSubset

__all__ = [
    "Batch",
    "Values",
    "assert_equal",
    "batches",
    "check",
    "misses",
    "reduce_tokens",
    "row_logprobs",
    "some_edges",
    "value_and_grad",
]

VOCABULARY = 61
Values = list[Tensor]
"""Per row a vector [T - 1]: one number per predicted token."""
RowLoss = Callable[[Values], Tensor]
"""Log-probabilities of every row's predicted tokens -> the loss."""


@dataclass(frozen=True)
class Batch:
    """Rows, weights >= 0, and numbers drawn for them.

    Attributes:
        rows: token ids.
        weights: per row and token.
        seed: of everything that is drawn.
        weighting: of the forest; the textbook's rows are masked accordingly.
    """

    rows: Rows
    weights: list[list[float]]
    seed: int
    weighting: Weighting = "rows"

    @property
    def forest(self) -> Forest:
        return Forest.from_sequences(self.rows, self.weights, weighting=self.weighting)

    @property
    def logits(self) -> Tensor:
        forest = self.forest
        return 2 * torch.randn(1, forest.num_tokens, VOCABULARY, generator=self.draw(), dtype=torch.float64)

    @property
    def masks(self) -> Values:
        return [torch.tensor(weight, dtype=torch.float64)[1:] for weight in self.masked]

    @property
    def masked(self) -> list[list[float]]:
        """The weights; where shared tokens are trained once, zeros behind the first row that trains one."""
        if self.weighting == "rows":
            return self.weights
        trained: set[tuple[int, ...]] = set()
        found = []
        for row, weights in zip(self.rows, self.weights, strict=True):
            prefixes = [tuple(row[: place + 1]) for place in range(len(row))]
            found.append([0.0 if p in trained else w for p, w in zip(prefixes, weights, strict=True)])
            trained |= {p for p, w in zip(prefixes, weights, strict=True) if w and len(p) > 1}
        return found

    def draw(self, salt: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1000 * salt)

    def per_row(self, salt: int) -> list[float]:
        """One number per row, of both signs."""
        return torch.randn(len(self.rows), generator=self.draw(salt), dtype=torch.float64).tolist()

    def per_token(self, salt: int) -> Values:
        """A vector as long as its row, for every row."""
        draw = self.draw(salt)
        return [torch.randn(len(row), generator=draw, dtype=torch.float64) for row in self.rows]

    def policy(self, salt: int, per_edge: bool) -> tuple[Any, Values]:
        """Log-probabilities of another policy near the batch's own: what a loss is given, and per row [T - 1].

        Given per row they differ between rows that share a token, and are NaN where the weight is 0.
        """
        forest, draw = self.forest, self.draw(salt)
        near = edge_logprobs(self.logits, forest)
        near = near + 0.3 * torch.randn(len(near), generator=draw, dtype=torch.float64)
        by_token = torch.zeros(forest.num_tokens, dtype=torch.float64)
        by_token[forest.edges.target] = near
        rows = [by_token[index] for index in forest.token_of]
        if per_edge:
            return near, [row[1:] for row in rows]
        rows = [row + 0.1 * torch.randn(len(row), generator=draw, dtype=torch.float64) for row in rows]
        unset = [torch.tensor(weight) == 0 for weight in self.masked]
        return [row.masked_fill(no, torch.nan) for row, no in zip(rows, unset, strict=True)], [row[1:] for row in rows]


@st.composite
def batches(draw: st.DrawFn, every_row_counts: bool = False, least_rows: int = 1) -> Batch:
    """Rows with masks: zeros, ones and fractions.

    Args:
        draw: of hypothesis.
        every_row_counts: every row has a prediction of weight above 0.
        least_rows: at least so many rows.
    """
    rows = draw(row_batches().filter(lambda rows: len(rows) >= least_rows))
    if every_row_counts:
        rows = [row if len(row) > 1 else [*row, 5] for row in rows]
    weight = st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.0, 2.5])
    weights = [draw(st.lists(weight, min_size=len(row), max_size=len(row))) for row in rows]
    if every_row_counts:
        weights = [[*row[:-1], row[-1] or 1.0] for row in weights]
    batch = Batch(rows, weights, draw(st.integers(0, 999)), draw(st.sampled_from(["rows", "rows", "once"])))
    assume(not every_row_counts or all(bool(mask.any()) for mask in batch.masks))
    return batch


def some_edges(forest: Forest, chosen: list[int]) -> EdgeSubset:
    """A forest as a loss sees one part of it."""
    fields = {item.name: getattr(forest, item.name) for item in dataclasses.fields(Forest)}
    return EdgeSubset(**fields, uncut=forest, edge_index=torch.tensor(chosen))


def row_logprobs(logits: Tensor, forest: Forest, temperature: float = 1.0) -> Values:
    """Log-probabilities of every row's predicted tokens, from the row's own copy of its logits."""
    found = []
    for row, index in zip(forest.sequences(), forest.token_of, strict=True):
        logp = torch.log_softmax(logits[0, index[:-1]] / temperature, dim=-1)
        found.append(logp.gather(1, row[1:, None])[:, 0])
    return found


def reduce_tokens(values: Values, masks: Values, reduction: Any) -> Tensor:
    """Sums and means by their definitions."""
    sums = [(mask * value).sum() for mask, value in zip(masks, values, strict=True)]
    totals = [mask.sum() for mask in masks]
    if isinstance(reduction, losses.Constant):
        return torch.stack(sums).sum() / (len(sums) * reduction.length)
    if isinstance(reduction, losses.PromptMean):
        prompts = list(reduction.prompts)
        found = []
        for prompt in sorted(set(prompts)):
            mine = [number for number, other in enumerate(prompts) if other == prompt]
            found.append(_mean(sum(sums[i] for i in mine), sum(totals[i] for i in mine)))  # type: ignore[arg-type]
        return torch.stack(found).mean()
    if reduction == "token_mean":
        return _mean(torch.stack(sums).sum(), torch.stack(totals).sum())
    if reduction == "row_mean":
        return torch.stack([_mean(value, total) for value, total in zip(sums, totals, strict=True)]).mean()
    assert reduction == "sum"
    return torch.stack(sums).sum()


def _mean(value: Tensor, total: Tensor) -> Tensor:
    return value / total if total > 0 else 0 * value


def value_and_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    value = function(leaf)
    (grad,) = torch.autograd.grad(value, leaf) if value.requires_grad else (torch.zeros_like(leaf),)
    return [value.detach(), grad]


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    for left, right in zip(got, expected, strict=True):
        assert (left - right).norm() <= tolerance * max(float(right.norm()), 1e-3), f"{left} instead of {right}"


def misses(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a wrong loss would be noticed, by its gradient."""
    return bool((got[1] - expected[1]).norm() > 1e-3 * expected[1].norm())


def check(
    batch: Batch, packed: Callable[[Tensor, Forest], Tensor], textbook: RowLoss, tolerance: float = 1e-10
) -> None:
    """Value and gradient of a loss of `edge_logprobs` equal those of the textbook's on separate rows."""
    forest, logits = batch.forest, batch.logits
    assert_equal(
        value_and_grad(lambda x: packed(edge_logprobs(x, forest), forest), logits),
        value_and_grad(lambda x: textbook(row_logprobs(x, forest)), logits),
        tolerance,
    )
