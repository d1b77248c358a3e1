"""Ranks that a server forks: it has imported PyTorch and compiled a first model, once for all tests of a session.

A rank that starts as a new process spends more on imports than on its steps. Forked ranks share the seed of
Python's hashes; ``test_launchers.py`` starts interpreters.
"""

import atexit
import faulthandler
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_ranks", "serve"]

WORLD = 2
ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str, folder: Path, *more: Any, seconds: float = 500, world: int = WORLD, worker: str = "worker"
) -> list[Any]:
    """Run ``worker(rank, port, folder, *more)`` of a module in one process per rank; what each wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = started()
    assert server.stdin is not None and server.stdout is not None
    calls = [(rank, port, str(folder), *more) for rank in range(world)]
    server.stdin.write(json.dumps([module, worker, calls, seconds]) + "\n")
    server.stdin.flush()
    failed = json.loads(server.stdout.readline())
    assert failed is None, f"rank {failed[0]} {failed[1]}: {(folder / f'{failed[0]}.txt').read_text()[-3000:]}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@functools.cache
def started() -> subprocess.Popen[str]:
    """The server. It ends with this process."""
    # The folder of the repository comes last: libraries look for packages called kernels.
    code = f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import serve; serve()"
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a fork takes one thread along
    server = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(end, server)
    return server


def end(server: subprocess.Popen[str]) -> None:
    """Kill it: another fork of this process may hold its standard input open."""
    server.kill()
    server.wait()


def serve() -> None:
    """Fork the ranks of every line; answer with the first that failed or outlasted its seconds, and how."""
    warm()
    for line in sys.stdin:
        module, worker, calls, seconds = json.loads(line)
        ranks = [fork(module, worker, call, seconds) for call in calls]
        end = time.monotonic() + seconds
        failed = next(((rank, how) for rank, pid in enumerate(ranks) if (how := failure(pid, end))), None)
        for pid in ranks[failed[0] :] if failed is not None else ():
            stop(pid)
        print(json.dumps(failed), flush=True)


def warm() -> None:
    """What ranks would each import and trace first."""
    shared_out = import_module("tests.scale.shared_out")
    torch.set_num_threads(1)
    for inner in ("eager", "aot_eager"):
        model = shared_out.Small()
        model.compile(backend="treefx", options={"inner": inner, "min_sharing": 1.0})
        model(input_ids=torch.tensor([[3, 4, 5], [3, 4, 6]])).logits.sum().backward()
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what forks share is not walked again and again
    gc.set_threshold(100_000, 20, 100)


def fork(module: str, worker: str, call: Sequence[Any], seconds: float) -> int:
    """A process that runs one rank. A file gets what it prints, also from C++, and where it crashes or hangs."""
    if pid := os.fork():
        return pid
    rank, _, folder, *_ = call
    with (Path(folder) / f"{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(0.9 * seconds, file=2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # runs in the background ignore it
    status = 1
    try:
        getattr(import_module(module), worker)(*call)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def failure(pid: int, end: float) -> str | None:
    """How a process failed: by a signal, with a status, or not in time; None when it exits with 0."""
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else f"exited with {code}" if code > 0 else f"ended by signal {-code}"
        time.sleep(0.02)
    return "did not end in time"


def stop(pid: int) -> None:
    """End a process, unless it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return
