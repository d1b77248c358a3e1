"""Run TRL's trainers without a compiler, with inductor and with treefx, in processes."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treefx.errors import InputError, TreefxError
from treefx.tools.bench.job.ways import ONE_COMPILER, check_same, empty_caches, in_process, logged_sharing
from treefx.tools.bench.trainers.material import make_material
from treefx.tools.bench.trl.cases import CASES, TrlCase

__all__ = ["WAYS", "TrlError", "choose", "run"]

WAYS = ("eager", "inductor", "treefx")


class TrlError(TreefxError):
    """A run failed, or losses or norms of gradients differ."""


def choose(names: Sequence[str]) -> list[TrlCase]:
    """The runs of these names, all for none.

    Raises:
        InputError: A name is unknown.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise InputError(f"expected runs of {'; '.join(CASES)}, got {'; '.join(unknown)}")
    return [CASES[name] for name in names] or list(CASES.values())


def run(
    names: Sequence[str] = (),
    *,
    ways: Sequence[str] = WAYS,
    rows: int = 32,
    layers: int = 2,
    hidden_size: int = 128,
    on_start: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train once in every way in every run that is named.

    Args:
        names: Of `CASES`; none for all.
        ways: Of `WAYS`, "eager" and "treefx" among them.
        rows: Turns of conversations to train on, or prompts to sample from.
        layers: Blocks of the model, a Qwen3.
        hidden_size: Its width, a multiple of 64.
        on_start: Told what begins.

    Returns:
        One record per run: ``version`` of the package; ``write``, what its user writes; ``steps``; ``sharing``
        and ``sharing_possible`` (raw over distinct tokens, the least and the most of a step), ``compiles`` and
        ``fallbacks`` (steps that shared nothing for a reason) of treefx; ``error``, the largest relative difference
        from the run without a compiler of a loss, a norm of gradients, and what else `measure` compares;
        ``eager_seconds``, ``inductor_seconds`` and ``treefx_seconds`` of whole runs, compilation included, and
        ``whole``, treefx's over inductor's. Where the trainer fails with inductor, ``note`` says how, and these two
        are "".

    Raises:
        TrlError: A run without a compiler or with treefx failed, or computed something else.
        InputError: An unknown name or size.
    """
    cases = choose(names)
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), rows=rows, layers=layers, hidden_size=hidden_size)
        return [_record(replace(case, folder=folder), ways, on_start) for case in cases]


def _record(case: TrlCase, ways: Sequence[str], on_start: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    note = ""
    for way in ways:
        on_start(f"{case.name}: {way}")
        try:
            found[way] = _start(replace(case, way=way))
        except TrlError as error:
            if way != "inductor":
                raise
            note = str(error).strip().splitlines()[-1]
    if not (shared := logged_sharing(found["treefx"]["log"])):
        raise TrlError(f"{case.name} was expected to log what treefx shared, and logged nothing of it")
    errors = {way: check_same(each, found["eager"], TrlError) for way, each in found.items()}
    seconds = {f"{way}_seconds": found[way]["whole_seconds"] if way in found else "" for way in WAYS}
    whole = found["treefx"]["whole_seconds"] / found["inductor"]["whole_seconds"] if "inductor" in found else ""
    return {
        "run": case.name, "version": found["treefx"]["version"], "write": case.write,
        "steps": len(found["treefx"]["log"]), **shared, "error": errors["treefx"], **seconds,
        "whole": whole, "note": note,
    }  # fmt: skip


def _start(case: TrlCase) -> dict[str, Any]:
    with empty_caches() as environment:
        given = {**environment, **ONE_COMPILER, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return in_process("treefx.tools.bench.trl.build", case, given, TrlError)
