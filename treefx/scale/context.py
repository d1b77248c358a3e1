"""Run one forest on several ranks: each gets some tokens and receives their ancestors.

``treefx.scale.shard_rows`` shares out rows, and no rank can have less than one; here one row, too long for a device, or
one tree lies on several. ``pieces`` assigns tokens to ranks; the operator `treefx::exchange` sends keys and values
within the model. Recurrences run on all tokens, each rank with its share of the heads (`treefx::tokens_to_heads`).
"""

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.kernels.memory import send
from treefx.passes.cuts.boundary_kv import Ranks
from treefx.runtime.cut import ContextRow, Exchange, PartTokens, WholeForest
from treefx.scale.outline import IntArray
from treefx.scale.pieces import TokenSplit, needed, split_tokens
from treefx.scale.price import Cost

__all__ = ["context_parallel"]


def context_parallel(forest: Forest, group: Any = None, cost: Cost = None) -> ContextRow:
    """Return this rank's tokens of a forest that the ranks of a group run together.

    Every distinct token is computed on one rank. In each attention, a rank receives the keys and values of its tokens'
    ancestors on other ranks, and returns their gradients; it receives no key that its tokens do not attend to. In each
    recurrence, a rank receives all tokens for its share of the heads, and returns the results. Losses and gradients
    **sum** over the ranks to those of one process on the whole forest; see `treefx.scale.shard_rows` for DDP's and
    FSDP2's division. Where rows are sharded over another dimension of a mesh, pass the share and this one's group.

    All ranks call it in the same order with the same forest, and run the model on their tokens the same number of
    times, forward and backward, even on different tokens.

    Args:
        forest: all of it, the same on every rank.
        group: the process group, as `torch.distributed` takes it; None: all processes.
        cost: see `split_tokens`; the same on every rank, so one rank's profile.

    Returns:
        The rank's packed row: `with treefx.use(row): compiled(**row.model_inputs())`, then
        `treefx.losses.sft(treefx.edge_logprobs(out.logits, row), row)`.

    Raises:
        InputError: no process group, ranks with different forests or costs, or a cost that does not do.

    Example:
        >>> row = treefx.scale.context_parallel(forest)
        >>> with treefx.use(row):
        ...     out = compiled(**row.model_inputs(), use_cache=False)
        >>> treefx.losses.sft(treefx.edge_logprobs(out.logits, row), row).backward()

        On a model sharded by FSDP2, and for losses that read whole rows (ratios of sequences, DPO):

        >>> treefx.backward(compiled, row, lambda logp, forest: treefx.losses.sft(logp, forest))
    """
    if not isinstance(forest, Forest):
        kind = type(forest).__name__
        raise InputError(f"context_parallel expected a treefx.Forest, got {kind}; build it with from_sequences")
    if not dist.is_initialized():
        raise InputError(
            "context_parallel needs a process group: call torch.distributed.init_process_group, or run torchrun"
        )
    processes: Any = dist.group.WORLD if group is None else group
    found = split_tokens(forest, dist.get_world_size(processes), cost)
    _check_alike(forest, found, processes)
    return make_context_row(forest, found, dist.get_rank(processes), processes.group_name)


def make_context_row(forest: Forest, found: TokenSplit, rank: int, group: str) -> ContextRow:
    """The row of a rank by a given split."""
    host = forest if forest.device.type == "cpu" else forest.to("cpu")
    end = host.subtree_end.numpy().astype(np.int64)
    owner = np.empty(len(end), dtype=np.int64)
    for number, held in reversed(list(enumerate(found.tokens))):  # ranks without tokens run the first one's, at the end
        owner[held] = number
    wanted = [needed(end, held) for held in found.tokens]
    sent = [above[owner[above] == rank] for above in wanted]
    counts = [[len(above) for above in sent], np.bincount(owner[wanted[rank]], minlength=len(sent)).tolist()]
    own, outside, leaving = map(torch.from_numpy, (found.tokens[rank], wanted[rank], np.concatenate(sent)))
    tokens = PartTokens(forest, host, own, outside, leaving)
    order = torch.from_numpy(_places(owner[wanted[rank]], tokens.sizes[1])).to(forest.device)
    held_by_rank = [own[owner[own] == number] for number, own in enumerate(found.tokens)]
    exchanged = torch.tensor(counts, dtype=torch.int64)
    ranks, whole = Ranks(group, len(sent)), _whole(forest, held_by_rank)
    cut = Exchange(ranks, tokens.vectors(), order, exchanged, tokens.parents, whole)
    is_own = torch.from_numpy(owner == rank)
    row = tokens.row(is_own[host.edges.source].nonzero().squeeze(1), cut)
    assert isinstance(row, ContextRow)
    return row


def _whole(forest: Forest, held: list[IntArray]) -> WholeForest:
    """Describe the forest whose tokens the ranks hold; a lone token gets another behind it."""
    place = torch.from_numpy(np.argsort(np.concatenate(held), kind="stable"))
    end, counts = forest.subtree_end.to(torch.int32), torch.tensor([len(tokens) for tokens in held])
    if len(place) == 1:
        end, place = end.new_tensor([1, 2]), torch.arange(2)
    return WholeForest(end, send(place, forest.device), counts)


def _places(owners: IntArray, size: int) -> IntArray:
    """Return the place of each boundary token in the received buffer.

    The buffer is ordered by owner; padding follows behind.
    """
    places = np.arange(size)
    places[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    return places


def _check_alike(forest: Forest, found: TokenSplit, group: Any) -> None:
    """Refuse ranks with different forests or splits, which would misread received tokens."""
    fields = (x.cpu().numpy() for x in (forest.tokens, forest.subtree_end, forest.token_weight))
    text = b"".join(x.tobytes() for x in (*fields, *map(np.append, found.tokens, found.received)))
    own = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    device = forest.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    marks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(marks, torch.tensor([own], device=device), group=group)
    told = torch.cat(marks).tolist()
    different = [dist.get_global_rank(group, rank) for rank, mark in enumerate(told) if mark != told[0]]
    if different:
        raise InputError(
            f"context_parallel expected the same forest and cost on every rank, but ranks {different} have others than "
            f"rank {dist.get_global_rank(group, 0)}: build the forest from the same rows and weights everywhere, and "
            "pass one rank's profile on all of them"
        )
