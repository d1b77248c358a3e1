"""Start the ranks, collect what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any

from treefx.errors import TreefxError
from treefx.tools.bench.job.failures import what_failed
from treefx.tools.bench.overlap.rank import RANKS, OverlapCase

__all__ = ["OverlapError", "run"]


class OverlapError(TreefxError):
    """A rank failed, or results differ."""


def run(
    *, rows: int = 1024, width: int = 1024, hidden: int = 4096, repeats: int = 11, seconds: float = 1200.0
) -> list[dict[str, Any]]:
    """Run an MLP on two processes over several links: untouched, chunked, by the gate.

    Args:
        rows: Tokens; at least 16 times 2 times 8, so that every number of chunks has aligned cuts.
        width: Of what enters and leaves the MLP.
        hidden: Of its middle, over both ranks.
        repeats: Timed steps of each way, taken in turn; medians count.
        seconds: After which the ranks are ended.

    Returns:
        One record per kind of ``collectives`` and ``ratio``, the link's time for a collective of the forward over that
        of its product alone (``product_ms``): ``link_GB_per_second``; the rates that the gate measured over this link
        (``gate_...``) and the chunks it chose, place by place; for ``forward`` and ``backward`` the milliseconds
        untouched (``..._1_ms``), in 2, 4, 8 chunks and with the gate, what the link carries of them
        (``..._link_ms``), the number of chunks that was fastest (``..._best``), which share of the untouched time it
        saves (``..._saved``) and of the link's (``..._hidden``); ``gate_step``, a step with the gate over an untouched
        one.

    Raises:
        OverlapError: A rank failed or hung, or a way differs in one bit from the untouched graph.
    """
    with tempfile.TemporaryDirectory() as folder:
        case = OverlapCase(
            name="overlap", rank=0, meeting=f"{folder}/meeting", rows=rows, width=width, hidden=hidden, repeats=repeats
        )
        records = _collect([replace(case, rank=rank) for rank in range(RANKS)], seconds)
    wrong = [f"{record['collectives']}, {way}" for record in records for way in record.pop("wrong")]
    if wrong:
        raise OverlapError(
            "expected results equal to the bit to those of the untouched graph, but these differ, so no time is "
            f"reported: {'; '.join(sorted(set(wrong)))}"
        )
    return records


def _collect(cases: list[OverlapCase], seconds: float) -> list[dict[str, Any]]:
    """Return the first rank's last line; after a failure, end the ranks that wait."""
    ranks: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(len(cases)) as pool:
        try:
            for case in cases:
                ranks.append(_start(case))
            endings = [pool.submit(rank.communicate) for rank in ranks]
            late = _wait(ranks, endings, seconds)
            failed = [at for at, rank in enumerate(ranks) if rank.poll()]
        finally:  # whatever happened: the pool ends once they have
            for rank in ranks:
                rank.kill()
    printed = [ending.result() for ending in endings]
    if failed:
        told = [f"rank {at}: {what_failed(printed[at][1])}" for at in failed]
        raise OverlapError("\n".join(["expected all ranks to end well, but:", *told]))
    if late:
        raise OverlapError(f"expected the ranks to end within {seconds:g} seconds; one still ran")
    records: list[dict[str, Any]] = json.loads(printed[0][0].strip().splitlines()[-1])
    return records


def _wait(ranks: list[subprocess.Popen[str]], endings: list[Future[tuple[str, str]]], seconds: float) -> bool:
    """Wait until all have ended or one has failed; whether the time was up before."""
    end = time.monotonic() + seconds
    waiting = set(endings)
    while waiting and not any(rank.poll() for rank in ranks):
        ended, waiting = wait(waiting, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if not ended:
            return True
    return False


def _start(case: OverlapCase) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "treefx.tools.bench.overlap.rank", json.dumps(asdict(case))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
