"""The pass: every product of a graph that meets a collective, in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

from treefx.errors import ConfigError
from treefx.passes.overlap.gate import Rates
from treefx.passes.overlap.gather_chunks import gather_chunks
from treefx.passes.overlap.open_sums import open_sums
from treefx.passes.overlap.page import draw_page
from treefx.passes.overlap.producers import KINDS, Gathered, Site, find_sites
from treefx.passes.overlap.send_chunks import send_chunks
from treefx.passes.overlap.time_line import TimeLine, spans
from treefx.passes.trace.fingerprint import source_fingerprint

__all__ = ["OverlapCollectives", "overlap_collectives"]


def overlap_collectives(graph: fx.Graph, chunks: int | Rates) -> int:
    """Chunk products and their collectives by rows, so that one hides the other.

    Before and after, with two chunks::

        mm = aten.mm(x, w)                      x_0, x_1 = aten.split_with_sizes(x, [512, 512])
        sum = c10d.all_reduce(mm, "sum", "0")   mm_0 = aten.mm(x_0, w); sum_0 = c10d.all_reduce(mm_0, "sum", "0")
        y = c10d.wait_tensor(sum)               mm_1 = aten.mm(x_1, w); sum_1 = c10d.all_reduce(mm_1, "sum", "0")
        ...                                     ...
        z = aten.relu(y)                        z = aten.relu(aten.cat([wait_tensor(sum_0), wait_tensor(sum_1)]))

    On a CPU results are equal to the bit: cuts stand where tiles of products end. Two ranks add the same numbers; of
    more, a collective may add in an order that depends on its size.

    Args:
        graph: Of ATen with fake values in ``meta["val"]``, as AOTAutograd and inductor hand it to their compilers and
            passes. Changed in place; its module has to be recompiled.
        chunks: A number for all, or rates to choose it by. All ranks have to give the same.

    Returns:
        How many collectives were cut.

    Raises:
        ConfigError: ``chunks`` is neither a number of at least 1 nor rates.
    """
    _check(chunks)
    open_sums(graph)
    if not _has_collectives(graph):
        return 0
    graph.eliminate_dead_code()  # AOTAutograd leaves dead products, and they would be second readers
    count = sum(_rewrite(site, chunks) for site in find_sites(graph))
    graph.eliminate_dead_code()
    graph.lint()
    return count


def _has_collectives(graph: fx.Graph) -> bool:
    return any(node.op == "call_function" and node.target in KINDS for node in graph.nodes)


def _check(chunks: int | Rates) -> None:
    if not isinstance(chunks, Rates) and (not isinstance(chunks, int) or chunks < 1):
        raise ConfigError(f"expected a number of chunks of at least 1, or Rates to choose it by; got {chunks!r}")


def _rewrite(site: Site, chunks: int | Rates) -> bool:
    count = chunks.chunks(site) if isinstance(chunks, Rates) else chunks
    if count == 1 or _pipelined_by_inductor(site):
        return False
    return gather_chunks(site, count) if isinstance(site, Gathered) else send_chunks(site, count)


def _pipelined_by_inductor(site: Site) -> bool:
    """Whether inductor has a fused kernel for it; it has none for an all-reduce."""
    if site.kind == "all_reduce" or not inductor._micro_pipeline_tp:
        return False
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    group: Any = site.collective.args[-1]
    return is_symm_mem_enabled_for_group(group)


class OverlapCollectives(CustomGraphPass):
    """Run the pass in inductor, as ``post_grad_custom_pre_pass``.

    ``torch._inductor.config.post_grad_custom_pre_pass = OverlapCollectives(4)``.

    Every rank has to make one, with the same argument: the rewriting depends on it and on shapes alone, so the order of
    collectives is the same everywhere. The ranks compare arguments here, where a difference is an error; in a graph it
    would be a deadlock.

    Raises:
        ConfigError: The number of chunks is none, or ranks gave different ones.
    """

    def __init__(self, chunks: int | Rates) -> None:
        _check(chunks)
        self.chunks = chunks
        self.count = 0
        """Collectives cut in this process; compilations answered by inductor's cache are not in it."""
        self.time_lines: list[TimeLine] = []
        """Of every graph with collectives that was seen, as rates predict it; none where a number was given."""
        if dist.is_available() and dist.is_initialized():
            given: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(given, chunks)
            if any(other != chunks for other in given):
                raise ConfigError(
                    f"expected the same chunks or rates on all ranks, got {given}; measure_rates gives equal ones"
                )

    def __call__(self, graph: fx.Graph) -> None:
        open_sums(graph)  # for the time lines too
        if isinstance(self.chunks, Rates) and _has_collectives(graph):
            graph.eliminate_dead_code()
            before, known = spans(graph, self.chunks), frozenset(node.name for node in graph.nodes)
            count = overlap_collectives(graph, self.chunks)
            self.time_lines.append(TimeLine(before, spans(graph, self.chunks, known), count))
        else:
            count = overlap_collectives(graph, self.chunks)
        self.count += count

    def to_html(self, path: str | Path) -> Path:
        """Draw products and collectives of every graph as time lines; return the path.

        Both forms are drawn, the original and the chunked one.

        Raises:
            ConfigError: No rates were given, or no graph with collectives was compiled yet.
        """
        if not self.time_lines:
            raise ConfigError(
                f"expected Rates and a compiled graph with collectives, got {self.chunks!r} and none of a predicted "
                "time; pass OverlapCollectives(measure_rates(...)) and call the model first (graphs that inductor's "
                "cache answered are not seen: fx_graph_cache=False)"
            )
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(draw_page(self.time_lines), encoding="utf-8")
        return target

    def uuid(self) -> Any:
        """Sources and the argument: inductor's caches look graphs up before the pass is run."""
        return source_fingerprint(), repr(self.chunks), inductor._micro_pipeline_tp
