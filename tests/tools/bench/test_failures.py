"""What a measurement says of a process that failed: its error, whatever a compiler or Python wrote after it."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from treefx.errors import TreefxError
from treefx.tools.bench.job.failures import what_failed
from treefx.tools.bench.job.ways import in_process

WARNINGS = "\n".join(f"x.cpp:{line}:5: warning: unused variable, which fills one complete line" for line in range(60))
ADVICE = "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if)"
FRAMES = "".join(f'  File "/{name}.py", line 3, in {name}\n    {name}()\n' for name in ("first", "second", "third"))
TRACEBACK = f"Traceback (most recent call last):\n{FRAMES}"
COMPILER = f"InductorError: CppCompileError: C++ compile error\n\nOutput:\n{WARNINGS}\nx.cpp:7:1: error: no tmp7\n"
IGNORED = "Exception ignored in: <function close>\nTraceback (most recent call last):\n  File\nOSError: it was closed\n"
LAUNCHER = f"\n{TRACEBACK}torch.distributed.elastic.ChildFailedError: a child failed\n{'=' * 60}\n"


@dataclass(frozen=True)
class Case:
    name: str = "case"


def test_errors_of_a_compiler_stand_last_and_not_its_warnings() -> None:
    said = what_failed(f"Loading: 100%\n{TRACEBACK}{COMPILER}{WARNINGS}\n\n\n{ADVICE}\n")
    assert said.splitlines() == [
        *FRAMES.splitlines(), "InductorError: CppCompileError: C++ compile error", "x.cpp:7:1: error: no tmp7"
    ]  # fmt: skip


@pytest.mark.parametrize("after", ["", f"\n{ADVICE}\n", IGNORED, LAUNCHER, f"{IGNORED}{IGNORED}{LAUNCHER}"])
def test_the_error_of_the_work_is_told(after: str) -> None:
    said = what_failed(
        f"{TRACEBACK}KeyError: 'earlier'\n\nDuring handling\n\n{TRACEBACK}ValueError: this\nand that\n{after}"
    )
    first, *rest = said.splitlines()[6:]
    assert first == "ValueError: this" and rest[0] == "and that"
    assert "earlier" not in said and "a child failed" not in said and "it was closed" not in said


def test_lines_of_a_rank_and_a_launcher_that_has_nothing_else_to_tell() -> None:
    ranked = "".join(f"[rank1]: {line}\n" for line in f"{TRACEBACK}ValueError: this".splitlines())
    assert what_failed(ranked + LAUNCHER).endswith("ValueError: this")
    assert "a child failed" in what_failed(LAUNCHER)


def test_what_is_no_traceback_ends_as_it_did() -> None:
    assert what_failed(f"{WARNINGS}\nSegmentation fault\n", 30).endswith("\nSegmentation fault")
    assert what_failed("") == ""
    assert len(what_failed(f"{TRACEBACK}ValueError: {'x' * 5000}")) == 2000


def test_a_process_s_error_is_in_the_message(tmp_path: Path) -> None:
    after = f"import atexit, sys\natexit.register(lambda: print({WARNINGS!r}, file=sys.stderr))"
    (tmp_path / "failing.py").write_text(f"{after}\nraise ValueError('the cause')", encoding="utf-8")
    with pytest.raises(TreefxError, match="(?s)'case' failed in its own process:.*ValueError: the cause"):
        in_process("failing", Case(), {**os.environ, "PYTHONPATH": str(tmp_path)}, TreefxError)
