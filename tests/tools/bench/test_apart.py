"""Work in processes of their own: state that stays, crashes, hangs."""

import os
import threading
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from treefx.tools.bench.gpu import turns
from treefx.tools.bench.gpu.turns import Turn, mark_compiled
from treefx.tools.bench.job.processes import Failure, Note, Partial, each_apart

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


def report(piece: str, note: Note) -> tuple[Any, bool]:
    """Report two records, then end, or hang."""
    for number in range(2):
        note({"piece": piece, "number": number})
    if piece == "hang":
        time.sleep(60)
    return piece, True


def test_records_arrive_before_their_piece_ends() -> None:
    found = list(each_apart(report, ["a", "hang"], seconds=1.0, method="fork"))
    assert [outcome for _, outcome in found[:3]] == [{"piece": "a", "number": 0}, {"piece": "a", "number": 1}, "a"]
    assert [type(outcome) for _, outcome in found] == [Partial, Partial, str, Partial, Partial, Failure]


def test_a_deadline_ends_what_runs_and_begins_nothing() -> None:
    found = list(each_apart(report, ["hang", "b"], seconds=60.0, method="fork", deadline=time.monotonic() + 1.0))
    assert [piece for piece, _ in found] == ["hang"] * 3
    assert "the deadline passed" in found[-1][1]


def meet(piece: tuple[str, str], note: Note) -> tuple[Any, bool]:
    """Two pieces that each wait for the other's mark; a third that dies meanwhile."""
    folder, name = Path(piece[0]), piece[1]
    SEEN.append(name)
    if name == "die":
        os._exit(7)
    (folder / name).touch()
    until = time.monotonic() + 30
    while len(list(folder.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    return (list(SEEN), len(list(folder.iterdir()))), True


def test_pieces_side_by_side(tmp_path: Path) -> None:
    pieces = [(str(tmp_path), name) for name in ("die", "a", "b")]
    found = {name: result for (_, name), result in each_apart(meet, pieces, seconds=60.0, method="fork", jobs=2)}
    assert "died in the start, exit code 7" in found["die"]
    assert found["a"] == (["a"], 2) and found["b"] == (["b"], 2), "each in a separate process, at the same time"


def measure_in_turn(path: str, note: Note) -> tuple[Any, bool]:
    """Note when the device is taken and given: when compiled code runs first, not when it compiles."""
    model = torch.nn.Linear(2, 2)
    turn = Turn(Path(path), model)
    with turn.taken_when_compiled():
        compiled = torch.compile(model)
        before = turn.taken
        compiled(torch.ones(2, 2)).sum().backward()
        began = time.monotonic()
    taken = turn.taken
    time.sleep(1.0)
    turn.give()
    ended = time.monotonic()
    turn.take_again()
    again = turn.taken
    turn.give()
    return (before, taken, began, ended, model.weight.grad is None, again), True


def test_processes_take_turns(tmp_path: Path) -> None:
    with torch._inductor.config.patch(compile_threads=1):  # a fork has no pool
        found = list(each_apart(measure_in_turn, [str(tmp_path / "turn")] * 2, seconds=300.0, method="fork", jobs=2))
    a, b = sorted((outcome for _, outcome in found), key=itemgetter(2))
    assert a[:2] == b[:2] == (False, True) and all(a[4:]) and all(b[4:])
    assert a[3] <= b[2] + 0.05, "the second begins when the first has given the device"


def test_the_first_turn_begins_when_all_have_compiled(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    turn = Turn(path, torch.nn.Linear(1, 1), together=2)
    waiting = threading.Thread(target=turn.take)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and not turn.taken
    mark_compiled(path)
    waiting.join(10)
    assert turn.taken and turn.compiled_at is not None
    late = Turn(tmp_path / "other", torch.nn.Linear(1, 1), together=2, compiled_by=time.time())
    late.take()
    assert late.taken


def test_who_finds_no_room_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After giving back what it has, as long as others hold the device; alone it tries once more."""
    monkeypatch.setattr(turns, "_PAUSE_S", 0.0)
    said: list[str] = []

    def call() -> str:
        said.append("call")
        if len(said) < 7:
            raise torch.OutOfMemoryError("full")
        return "fits"

    monkeypatch.setattr(turns, "_crowded", lambda: True)
    assert turns.patiently(call, lambda: said.append("give")) == "fits"
    assert said == ["call", "give"] * 3 + ["call"]
    said.clear()
    monkeypatch.setattr(turns, "_crowded", lambda: False)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        turns.patiently(call, lambda: said.append("give"))
    assert said == ["call", "give", "call"]
