"""Work in processes of their own: state that stays, crashes, hangs."""

import os
import time
from typing import Any

from treefx.bench.job.processes import Failure, Note, each_apart

SEEN: list[str] = []


def work(piece: str, note: Note) -> tuple[Any, bool]:
    SEEN.append(piece)
    note(f"step {piece}")
    if piece == "die":
        os._exit(7)
    if piece == "hang":
        time.sleep(60)
    return list(SEEN), piece != "spoiled"


def test_a_fresh_process_after_each_that_was_lost() -> None:
    pieces = ["a", "b", "spoiled", "c", "die", "d", "hang", "e"]
    found = list(each_apart(work, pieces, seconds=2.0, method="fork"))
    assert [piece for piece, _ in found] == pieces
    results = dict(found)
    assert results["b"] == ["a", "b"] and results["spoiled"] == ["a", "b", "spoiled"], "one process, one state"
    assert results["c"] == ["c"] and results["d"] == ["d"] and results["e"] == ["e"]
    assert isinstance(results["die"], Failure) and "died in step die, exit code 7" in results["die"]
    assert isinstance(results["hang"], Failure) and "nothing came back from step hang" in results["hang"]
    assert not SEEN


def test_what_became_of_a_piece_may_decide_on_the_next() -> None:
    outcomes: list[Any] = []

    def pieces() -> Any:
        yield "a"
        yield "b" if outcomes[-1] == ["a"] else "die"

    for _, outcome in each_apart(work, pieces(), seconds=30.0, method="fork"):
        outcomes.append(outcome)
    assert outcomes == [["a"], ["a", "b"]]
