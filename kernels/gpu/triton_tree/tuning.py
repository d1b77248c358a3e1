"""Choose the fastest configuration of a kernel: measured, or predicted by tiles.

With ``TREEFX_TUNE=1`` a kernel that meets a new kind of attention (head dims, group, type, operations of the score,
mean length of the nodes) is timed in each of its few configurations on the tensors at hand, by Triton's own benchmark.
Without it nothing is measured, and earlier measurements are used: so the bits of a result depend on the file of
findings alone, ``tuning.json`` in the cache folder (``TREEFX_CACHE_DIR``). ``treefx bench attention --device cuda``
tunes all the kernels that it times.

Where nothing was measured of a kind of attention, the tiles of the forest at hand are counted in every configuration,
and a device's seconds per program and tile (`Rates`) predict the fastest. The rates of a device are
fitted by ``treefx bench gpu --stage rates --keep``, into ``rates.json`` of the same folder; the file of that name
next to this module holds those of measured devices, and no guess. They were fitted with a scaled
product as the score: another one, and a device without rates, has the first guess.

Why not ``triton.autotune``: the lists of tiles are arguments whose contents depend on the size of the tiles, so every
configuration needs a hook that exchanges them, and Triton's autotuner does not keep its findings on disk where a
configuration has a hook (``Autotuner.check_disk_cache``). It also measures unasked, even a single configuration that
pruning has left; it knows a kind of attention only by arguments of the kernel, of which the length of the nodes is
none; and of a configuration that cannot be compiled it takes three types of exception, while passes of the compiler
raise others.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels.code_files import cache_folder
from treefx.kernels.gpu.triton_tree.configs import Config, Problem, candidates
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.support import device_name, processors
from treefx.kernels.memory import Bounded, host_copies
from treefx.kernels.tiles.tile_counts import Rates, count_tiles, predict_time
from treefx.kernels.tiles.tree_blocks import forget_blocks, remembered

__all__ = ["BestConfig", "configs_of_forest", "keep_rates", "rates_key", "tile_name", "tuned", "tuning_wanted"]

_log = logging.getLogger(__name__)
_FILE = "tuning.json"
_RATES_FILE = "rates.json"
_BARE = "mul"
"""The operations of a score that is a scaled product."""
_without_room: Bounded[str, None] = Bounded(1024)
"""Problems that could not be measured, and are not tried again in this process."""


def tuning_wanted() -> bool:
    """Return whether ``TREEFX_TUNE`` enables measurements."""
    return os.environ.get("TREEFX_TUNE", "0") not in ("", "0")


@dataclass(frozen=True)
class BestConfig:
    """The fastest configurations for a forest on the device at hand.

    Attributes:
        ends: ``subtree_end`` of the forest, int32 ``[N]``.
        heads: key heads, of all elements of a batch.
    """

    ends: Tensor
    heads: int

    def __call__(self, problem: Problem) -> Config:
        """Return the fastest configuration found, else the predicted one, else the first guess."""
        choices, findings = candidates(problem), _findings()
        found = findings.get(_key(problem, self.ends.device)) if findings else None
        known = next((config for config in choices if _numbers(config) == found), None)
        return known or self._foretold(problem, choices) or choices[0]

    def _foretold(self, problem: Problem, choices: Sequence[Config]) -> Config | None:
        if not _rates() or problem.operations != _BARE:
            return None
        rates = _rates().get(device_name(self.ends.device), {}).get(rates_key(problem), {})
        if tile_name(choices[0]) not in rates:
            return None

        def choose() -> Config:
            (ends,) = host_copies([self.ends]) or [self.ends]
            by_key = problem.kernel in ("backward_keys", "backward_once")

            def time(config: Config) -> float:
                counts = count_tiles(ends, config.block_m, config.block_n, problem.group, by_key=by_key)
                busy = processors(self.ends.device)
                return predict_time(counts, Rates(*rates[tile_name(config)]), self.heads, busy, cut=by_key)

            return min((config for config in choices if tile_name(config) in rates), key=time)

        chosen: Config = remembered(("configuration", problem, self.heads), (self.ends,), choose)
        return chosen


def configs_of_forest(attention: Attention, kernels: Sequence[str]) -> tuple[Config, ...]:
    """Return configurations of kernels, if other forests of this kind may have others."""
    return tuple(map(attention.config, kernels)) if _rates().get(device_name(attention.inputs.q.device)) else ()


def tuned(attention: Attention, kernel: str, make: Callable[[Attention], Launch]) -> Launch:
    """Return the launch of a kernel in its best configuration, measured if enabled and new.

    Args:
        attention: the attention.
        kernel: the kernel's name.
        make: builds the launch of an attention like the given one; running it twice does no harm.
    """
    problem = attention.problem(kernel)
    if not isinstance(attention.choose, BestConfig) or not tuning_wanted():
        return make(attention)
    key = _key(problem, attention.inputs.q.device)
    if key not in _findings().keys() | _without_room.keys():
        choices = candidates(problem)
        times = {config: _milliseconds(make(replace(attention, choose=_always(config)))) for config in choices}
        best = min(choices, key=times.__getitem__)
        _log.info("%s: %s", key, {str(config): times[config] for config in choices})
        if any(math.isnan(time) for time in times.values()):
            _without_room[key] = None
        else:
            _remember(key, best)
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


def _key(problem: Problem, device: torch.device) -> str:
    import triton

    return " ".join(map(str, (device_name(device), triton.__version__, *vars(problem).values())))


def rates_key(problem: Problem) -> str:
    """Return the key of a kernel's rates, besides the device."""
    kind = problem.kernel, problem.path, problem.dtype, problem.head_dim, problem.value_dim
    return " ".join(map(str, kind)).replace("torch.", "")


def tile_name(config: Config) -> str:
    """Return a configuration as tables show it."""
    return f"{config.block_m}x{config.block_n} w{config.warps} s{config.stages}"


def keep_rates(rates: dict[str, dict[str, list[float]]]) -> Path:
    """Keep rates of the current device from now on, in this process too, and return the file.

    Args:
        rates: by `rates_key` and `tile_name`, the three numbers of `Rates`.
    """
    path, device = cache_folder() / _RATES_FILE, device_name(torch.device("cpu"))
    kept = _read_rates(path)
    try:
        _write(path, {**kept, device: {**kept.get(device, {}), **rates}})
    except OSError as reason:
        raise InputError(f"rates cannot be kept in {path}: {reason}; TREEFX_CACHE_DIR names another folder") from reason
    _rates.cache_clear()
    forget_blocks()
    return path


@lru_cache(maxsize=1)
def _rates() -> dict[str, Any]:
    """Return rates by device: locally fitted ones before those shipped with treefx."""
    shipped, own = _read_rates(Path(__file__).parent / _RATES_FILE), _read_rates(cache_folder() / _RATES_FILE)
    return {device: {**shipped.get(device, {}), **own.get(device, {})} for device in {**shipped, **own}}


def _numbers(config: Config) -> list[int]:
    return list(vars(config).values())


@lru_cache(maxsize=1)
def _findings() -> dict[str, Any]:
    return _read(cache_folder() / _FILE)


def _read(path: Path) -> dict[str, Any]:
    """Read a file's content; an unreadable file counts as empty."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_rates(path: Path) -> dict[str, Any]:
    """Return rates on disk by device, kernel and tile; malformed devices are skipped."""
    return {device: kinds for device, kinds in _read(path).items() if _are_rates(kinds)}


def _are_rates(kinds: Any) -> bool:
    tiles = kinds.values() if isinstance(kinds, dict) else [None]
    rates = [rate for by_tile in tiles for rate in (by_tile.values() if isinstance(by_tile, dict) else [None])]
    return all(isinstance(rate, list) and len(rate) == 3 and all(map(_is_rate, rate)) for rate in rates)


def _is_rate(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e12


def _remember(key: str, config: Config) -> None:
    mine = _findings()
    _findings.cache_clear()
    found = {**mine, **_findings(), key: _numbers(config)}  # another process may have written in the meantime
    mine = _findings()
    mine.update(found)
    forget_blocks()  # and launches in other configurations
    path = cache_folder() / _FILE
    try:
        _write(path, found)
    except OSError as reason:
        _log.warning("the findings of tuning cannot be kept in %s: %s", path, reason)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
    partial.replace(path)
