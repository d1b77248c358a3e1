"""Which configuration of a kernel is fastest: measured once for a kind of attention, kept on disk.

With ``TREEFX_TUNE=1`` a kernel that meets a new kind of attention (head dims, group, type, operations of the score,
mean length of the nodes) is timed in each of its few configurations on the tensors at hand, by Triton's own benchmark.
Without it nothing is measured, and what was measured before is used: so the bits of a result depend on the file of
findings alone, ``tuning.json`` in the cache folder (``TREEFX_CACHE_DIR``). ``treefx bench attention --device cuda``
tunes all the kernels that it times.

Why not ``triton.autotune``: the lists of tiles are arguments whose contents depend on the size of the tiles, so every
configuration needs a hook that exchanges them, and Triton's autotuner does not keep its findings on disk where a
configuration has a hook (``Autotuner.check_disk_cache``). It also measures unasked, even a single configuration that
pruning has left; it knows a kind of attention only by arguments of the kernel, of which the length of the nodes is
none; and of a configuration that cannot be compiled it takes three types of exception, while the passes that
specialise warps raise others.
"""

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from treefx.kernels.gpu.triton_tree.codegen import cache_folder
from treefx.kernels.gpu.triton_tree.configs import Config, Problem, candidates
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch

__all__ = ["best_config", "tuned", "tuning_wanted"]

_log = logging.getLogger(__name__)
_FILE = "tuning.json"
_without_room: set[str] = set()
"""Problems that could not be measured, and are not tried again in this process."""


def tuning_wanted() -> bool:
    """Return whether ``TREEFX_TUNE`` asks for measuring."""
    return os.environ.get("TREEFX_TUNE", "0") not in ("", "0")


def best_config(problem: Problem) -> Config:
    """Return the fastest configuration that was found for a problem on this device, else the first guess."""
    choices, findings = candidates(problem), _findings()
    found = findings.get(_key(problem)) if findings else None
    return next((config for config in choices if _numbers(config) == found), choices[0])


def tuned(attention: Attention, kernel: str, make: Callable[[Attention], Launch]) -> Launch:
    """Return the launch of a kernel in its best configuration, which is measured first if that is wanted and new.

    Args:
        attention: the attention.
        kernel: the kernel's name.
        make: builds the launch of an attention like the given one; running it twice does no harm.
    """
    problem = attention.problem(kernel)
    known = _findings().keys() | _without_room if tuning_wanted() else set()
    if attention.choose is best_config and tuning_wanted() and _key(problem) not in known:
        choices = candidates(problem)
        times = {config: _milliseconds(make(replace(attention, choose=_always(config)))) for config in choices}
        best = min(choices, key=times.__getitem__)
        _log.info("%s: %s", _key(problem), {str(config): times[config] for config in choices})
        if any(math.isnan(time) for time in times.values()):
            _without_room.add(_key(problem))
        else:
            _remember(_key(problem), best)
    return make(attention)


def _always(config: Config) -> Callable[[Problem], Config]:
    return lambda problem: config


def _milliseconds(launch: Launch) -> float:
    """Time a launch; a configuration that the compiler or the device refuses takes for ever.

    Without room for measuring, which takes 256 MB, nothing is known (NaN): it says nothing of a step with room.
    """
    import triton.testing

    try:
        return float(triton.testing.do_bench(launch.run, warmup=10, rep=40, return_mode="median"))
    except torch.OutOfMemoryError:
        _log.info("%s is not timed: there is no room to measure it in", launch.config)
        return math.nan
    except Exception as reason:  # of many types: no room in shared memory, a pass of the compiler that fails
        _log.info("%s cannot run: %s", launch.config, reason)
        return float("inf")


def _key(problem: Problem) -> str:
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return " ".join(map(str, (device, triton.__version__, *vars(problem).values())))


def _numbers(config: Config) -> list[int]:
    return list(vars(config).values())


@lru_cache(maxsize=1)
def _findings() -> dict[str, Any]:
    """Return what is on disk; a file that cannot be read counts as empty."""
    try:
        found = json.loads((cache_folder() / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(key: str, config: Config) -> None:
    mine = _findings()
    _findings.cache_clear()
    found = {**mine, **_findings(), key: _numbers(config)}  # another process may have written in the meantime
    mine = _findings()
    mine.update(found)
    path = cache_folder() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
        partial.replace(path)
    except OSError as reason:
        _log.warning("the findings of tuning cannot be kept in %s: %s", path, reason)
