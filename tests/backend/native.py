"""Models, forests and losses of the native level."""

import random
from typing import Any

from hypothesis import strategies as st
from torch import Tensor, nn

import treefx
from tests.oracle import (
    Step,
)

__all__ = ["Rows", "TakesCacheFlag", "branches", "native_loss", "random_weights", "rollouts"]


Rows = list[list[int]]


def rollouts(seed: int = 0) -> Rows:
    """Forks of forks over two roots, a duplicate, a prefix of another row and a row of one token."""
    draw = random.Random(seed)
    tokens = lambda count: [draw.randrange(3, 60) for _ in range(count)]  # noqa: E731
    stem, branch = tokens(7), tokens(5)
    rows = [stem + branch + tokens(4), stem + branch + tokens(3), stem + branch, stem + tokens(6)]
    rows += [list(rows[0]), tokens(9), [60], stem + tokens(2)]
    draw.shuffle(rows)
    return rows


def random_weights(rows: Rows, seed: int = 0) -> list[list[float]]:
    """A weight per row and token, some of them zero, some negative."""
    draw = random.Random(seed)
    return [[draw.choice([0.0, draw.uniform(-0.5, 1.5)]) for _ in row] for row in rows]


def native_loss(forest: treefx.Forest, reduction: Any = "sum") -> Step:
    def step(model: nn.Module) -> Tensor:
        with treefx.use(forest):
            out = model(**forest.model_inputs(), use_cache=False)
        return treefx.losses.sft(treefx.edge_logprobs(out.logits, forest), forest, reduction=reduction)

    return step


class TakesCacheFlag(nn.Module):
    """Lets a TinyLM be called as a transformers model is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
    ) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids, labels=labels)


node_tokens = st.lists(st.integers(3, 6), min_size=1, max_size=4)


branches = st.recursive(
    node_tokens.map(lambda tail: [tail]),
    lambda inner: st.tuples(node_tokens, st.lists(inner, max_size=3)).map(
        lambda pair: [pair[0], *(pair[0] + row for rows in pair[1] for row in rows)]
    ),
    max_leaves=6,
)
"""Rows of a random tree: every prefix at a fork is a row too, over four token ids, so that rows collide."""
