"""Batches of random tokens with a prefix of a given length in common."""

import torch

from treefx.data import Batch
from treefx.errors import InputError

__all__ = ["shared_prefix_batch"]


def shared_prefix_batch(rows: int, prefix: int, suffix: int, vocab_size: int, *, seed: int = 0) -> Batch:
    """Make ``rows`` rows of ``prefix`` equal and ``suffix`` random tokens, all labelled.

    Suffixes differ in their first token, so exactly ``prefix + rows * suffix`` tokens are distinct.

    Raises:
        InputError: A size is negative, there is no token, or the vocabulary has fewer ids than there are
        rows.
    """
    if rows < 1 or prefix < 0 or suffix < 1 or vocab_size < rows:
        raise InputError(
            "a batch needs rows >= 1, prefix >= 0, suffix >= 1 and vocab_size >= rows; "
            f"got rows={rows}, prefix={prefix}, suffix={suffix}, vocab_size={vocab_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(vocab_size, (prefix,), generator=generator).expand(rows, prefix)
    own = torch.randint(vocab_size, (rows, suffix), generator=generator)
    own[:, 0] = torch.randperm(vocab_size, generator=generator)[:rows]
    ids = torch.cat([shared, own], dim=1)
    return Batch(ids, torch.ones_like(ids), ids.clone())
