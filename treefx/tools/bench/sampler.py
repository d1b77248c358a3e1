"""Count a step's tokens on real trajectories by batch order: ``treefx bench sampler``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treefx.data import (
    Conversation,
    TreeBatchSampler,
    distinct_tokens,
    first_fit_batches,
    load,
    make_samples,
    scripted_conversations,
)
from treefx.errors import InputError
from treefx.output import watch
from treefx.tools.bench.job.rollouts import make_tokenizer

__all__ = ["measure", "run"]


def run(
    paths: Sequence[Path], *, max_tokens: int, tokenizer: str, vocab_size: int, seed: int = 0, json: bool = False
) -> list[dict[str, Any]]:
    """Batch the rows of each source: one row per assistant turn, shuffled.

    Args:
        paths: files or folders in any format that `treefx.data.load` knows; none for the scripted sample.
        max_tokens: budget of a batch, in distinct tokens.
        tokenizer: "bpe" or "bytes".
        vocab_size: largest vocabulary of the BPE.
        seed: of the shuffle.
        json: a program reads the result, so no progress bar is shown.

    Returns:
        One record per source, see `measure`.

    Raises:
        InputError: a source cannot be read, has no rows, or has a row that is longer than the budget.
    """
    shown: Sequence[Path | None] = paths or [None]
    records = []
    for path in watch(shown, "batching", quiet=json):
        conversations = scripted_conversations() if path is None else load(path)
        name = "scripted sample" if path is None else str(path)
        records.append({"data": name} | measure(conversations, max_tokens, tokenizer, vocab_size, seed))
    return records


def measure(
    conversations: Sequence[Conversation], max_tokens: int, tokenizer: str, vocab_size: int, seed: int
) -> dict[str, Any]:
    """Sum distinct tokens per batch, of the sampler and of first-fit in arrival order.

    Returns:
        `rows`, `raw_tokens`; `minimum`: distinct tokens of all rows as one forest, what no batching is below;
        `batches` and `sampler` of `TreeBatchSampler`, `sampler_ratio` over the minimum; `first_fit_batches`,
        `first_fit` and `first_fit_ratio` of first-fit.
    """
    encoder = make_tokenizer(conversations, tokenizer, vocab_size)
    rows = [sample.tokens for sample in make_samples(conversations, encoder)]
    if not rows:
        raise InputError("expected at least one assistant turn in the data, got none")
    rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    sampler = TreeBatchSampler(rows, max_tokens, seed=seed)
    forest = sampler.forest
    ours, first = list(sampler), first_fit_batches(forest, max_tokens)
    computed = {"sampler": distinct_tokens(forest, ours), "first_fit": distinct_tokens(forest, first)}
    return {
        "rows": len(rows),
        "raw_tokens": forest.raw_tokens,
        "minimum": forest.num_tokens,
        "batches": len(ours),
        "sampler": computed["sampler"],
        "sampler_ratio": computed["sampler"] / forest.num_tokens,
        "first_fit_batches": len(first),
        "first_fit": computed["first_fit"],
        "first_fit_ratio": computed["first_fit"] / forest.num_tokens,
    }
