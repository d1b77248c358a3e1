"""Cost models of no particular machine, and the brute force plans are judged by."""

import itertools
from collections.abc import Iterator

from treefx.planning.cost.model import Bytes, CostModel, Seconds
from treefx.planning.search.blocks import Blocks


def linear_cost(
    *,
    saved: float = 1.0,
    run: float = 1.0,
    store: float = 0.2,
    copy: float = 0.0,
    resident: float = 0.0,
    part_seconds: float = 0.0,
    host: float | None = None,
) -> CostModel:
    """Bytes per token: `saved`, `run` (both passes), `store` (K/V and gradients, half each), `copy` per boundary token.

    A pass takes `part_seconds` and 1 s per token, the backward twice that, a K/V pass half.
    """
    rows = [[0.0, run, copy, 0.0, 0.0, 0.0]]
    return CostModel(
        resident_bytes=resident,
        saved=Bytes([[0.0, saved, copy, 0.0, 0.0, 0.0]]),
        forward=Bytes(rows),
        backward=Bytes(rows),
        kv=Bytes([[0.0, run / 2, copy, 0.0, 0.0, 0.0]]),
        kv_bytes_per_token=store / 2,
        kv_grad_bytes_per_token=store / 2,
        forward_seconds=Seconds(part_seconds, 1.0, 0.0),
        backward_seconds=Seconds(part_seconds, 2.0, 0.0),
        kv_seconds=Seconds(part_seconds / 2, 0.5, 0.0),
        host_bytes_per_second=host,
    )


def all_plans(blocks: Blocks) -> Iterator[tuple[list[int], list[str]]]:
    """Every way to cut and keep: per block the top block of its part, and per part (by its top) what it keeps."""
    inner = [block for block in range(len(blocks)) if blocks.parent[block] >= 0]
    for cuts in itertools.product([False, True], repeat=len(inner)):
        top = list(range(len(blocks)))
        for block, cut in zip(inner, cuts, strict=True):
            if not cut:
                top[block] = top[blocks.parent[block]]
        tops = sorted(set(top))
        has_children = {top[blocks.parent[part]] for part in tops if blocks.parent[part] >= 0}
        choices = [["keep", "recompute"] if part in has_children else ["keep"] for part in tops]
        for modes in itertools.product(*choices):
            keep = dict(zip(tops, modes, strict=True))
            yield top, [keep[part] for part in top]


def evaluate(blocks: Blocks, cost: CostModel, top: list[int], keep: list[str]) -> tuple[float, float]:
    """Peak bytes and seconds of a plan, straight from the definitions: walks the parts depth first."""
    tops = sorted(set(top))
    tokens = dict.fromkeys(tops, 0)
    pairs = dict.fromkeys(tops, 0)
    edges = dict.fromkeys(tops, 0)
    outgoing = dict.fromkeys(tops, 0)
    for block, part in enumerate(top):
        start, stop = int(blocks.start[block]), int(blocks.stop[block])
        for token in range(start, stop):
            tokens[part] += 1
            pairs[part] += int(blocks.counts.depth[token]) + 1
            edges[part] += int((blocks.counts.parent == token).sum())
            end = int(blocks.counts.end[token])
            below = [b for b in range(len(blocks)) if token <= blocks.start[b] < end and top[b] != part]
            outgoing[part] += bool(below)
    peak, seconds = 0.0, 0.0
    held = {-1: cost.resident_bytes}
    for part in tops:
        above = int(blocks.parent[part])
        have = held[top[above]] if above >= 0 else held[-1]
        n, p, e = tokens[part], int(blocks.depth[part]), edges[part]
        store = (cost.kv_bytes_per_token + cost.kv_grad_bytes_per_token) * outgoing[part]
        again = cost.kv_bytes_per_token * outgoing[part] if keep[part] == "recompute" else 0.0
        peak = max(peak, have + store + again + max(cost.forward(n, p, e), cost.backward(n, p, e)))
        held[part] = have + store + (cost.saved(n, p, e) if keep[part] == "keep" else 0.0)
        passes = [cost.forward_seconds, cost.backward_seconds] + [cost.kv_seconds] * (keep[part] == "recompute")
        seconds += sum(each.part + each.token * n + each.pair * pairs[part] for each in passes)
    return peak, seconds
