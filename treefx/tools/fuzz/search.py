"""Search: draw programs, judge them in workers, shrink failures, record everything."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treefx.errors import InputError
from treefx.tools.fuzz.describe import describe
from treefx.tools.fuzz.grammar import choose_families, generate
from treefx.tools.fuzz.journal import Finding, Journal
from treefx.tools.fuzz.script import script
from treefx.tools.fuzz.shrink import shrink
from treefx.tools.fuzz.truth import FAILURES, Outcome
from treefx.tools.fuzz.worker import Worker

__all__ = ["Search", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a search does.

    Raises:
        InputError: A family does not exist, or a number is too small.
    """

    seed: int = 0
    families: tuple[str, ...] = ()
    programs: int = 300
    minutes: float = 0.0
    """0: as long as it takes."""
    workers: int = 1
    inner: str = ""
    """"" draws it for every program."""
    out: Path | None = None
    limit_s: float = 120.0
    shrunk: int = 3
    """How many failures of a kind and family are made smaller."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", choose_families(self.families))
        for name in ("programs", "workers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.inner not in ("", "eager", "aot_eager", "inductor"):
            raise InputError(f"inner must be eager, aot_eager or inductor, got {self.inner!r}")


class Search:
    """Hold one search; ``run`` may be interrupted, and resumes by settings and folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.journal = Journal(settings.out, self._drawn_from())
        self._lock = threading.Lock()
        self._shrunk: Counter[tuple[str, str]] = Counter()
        self._end = float("inf")
        self._numbers: Iterator[int] = iter(())

    def _drawn_from(self) -> dict[str, Any]:
        """What decides which programs the search draws."""
        settings = self.settings
        return {"seed": settings.seed, "families": list(settings.families), "inner": settings.inner}

    def _program(self, number: int) -> Any:
        return generate(self.settings.seed, number, self.settings.families, self.settings.inner)

    def _described(self, program: Any) -> str:
        return describe(program)

    def _script(self, program: Any, note: str) -> str:
        return script(program, note)

    def _smaller(self, program: Any, fails: Callable[[Any], bool]) -> Any:
        return shrink(program, fails)

    @property
    def findings(self) -> list[Finding]:
        """What became of the programs of this search, in their order."""
        wanted = [item for item in self.journal.findings if item.number < self.settings.programs]
        return sorted(wanted, key=lambda item: item.number)

    def run(self, on_finding: Callable[[Finding], None] = lambda finding: None) -> list[Finding]:
        """Judge the programs that are not done yet; ``on_finding`` is told each."""
        if self.settings.minutes:
            self._end = time.monotonic() + 60 * self.settings.minutes
        done = self.journal.done
        self._numbers = iter([number for number in range(self.settings.programs) if number not in done])
        count = range(self.settings.workers)
        threads = [threading.Thread(target=self._work, args=(on_finding,), daemon=True) for _ in count]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._end = 0.0
            raise
        return self.findings

    def _next(self) -> int | None:
        with self._lock:
            return None if time.monotonic() >= self._end else next(self._numbers, None)

    def _work(self, on_finding: Callable[[Finding], None]) -> None:
        worker = Worker(self.settings.limit_s)
        try:
            while (number := self._next()) is not None:
                program = self._program(number)
                finding = self._finding(worker, program, worker.run(program))
                with self._lock:
                    self.journal.add(finding)
                    on_finding(finding)
        finally:
            worker.close()

    def _finding(self, worker: Worker, program: Any, outcome: Outcome) -> Finding:
        place = None
        if outcome.kind in FAILURES:
            program, outcome = self._confirmed(worker, program, outcome)
            name = f"{outcome.kind}-{program.family}-{program.seed}"
            place = self.journal.write_script(name, self._script(program, f"{outcome.kind}: {outcome.note}"))
        return Finding(
            program.seed, program.family, program.inner, outcome.kind, outcome.note, outcome.error, outcome.seconds,
            self._described(program), place,
        )  # fmt: skip

    def _confirmed(self, worker: Worker, program: Any, outcome: Outcome) -> tuple[Any, Outcome]:
        """Repeat the failure in a separate process, and shrink it."""
        before = worker.done[:-1]
        worker.restart()
        again = worker.run(program)
        if not _same(again, outcome):
            note = f"{outcome.note} (not in a fresh process: after the programs {before[-8:]})"
            return program, Outcome(outcome.kind, note, outcome.error, outcome.seconds)
        with self._lock:
            self._shrunk[outcome.kind, program.family] += 1
            wanted = self._shrunk[outcome.kind, program.family] <= self.settings.shrunk and outcome.kind != "hung"
        if wanted:
            program = self._smaller(program, lambda candidate: _same(worker.run(candidate), outcome))
            outcome = worker.run(program)
        return program, outcome if _same(outcome, again) else again


def _same(outcome: Outcome, other: Outcome) -> bool:
    """Whether two failures are of one kind; crashes of one error."""
    same_error = outcome.kind != "crashed" or outcome.note.split(":")[0] == other.note.split(":")[0]
    return outcome.kind == other.kind and same_error
