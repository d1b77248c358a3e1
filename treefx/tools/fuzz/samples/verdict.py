"""Judge a program over PyTorch's samples by eager, treefx and ``aot_eager``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treefx.tools.fuzz.samples.play import Seen, play
from treefx.tools.fuzz.samples.sample import Sample
from treefx.tools.fuzz.truth import Outcome

__all__ = ["differences", "judge_sample"]

_TOLERANCES = {
    torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5,
    torch.float16: 1e-2, torch.bfloat16: 1e-2,
}  # fmt: skip


def judge_sample(sample: Sample) -> Outcome:
    """Run a program and say what became of it, sample by sample; the worst counts."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _judge(sample)
    return Outcome(found.kind, found.note, seconds=time.perf_counter() - start, stats=found.stats)


def _judge(sample: Sample) -> Outcome:
    wanted = play(sample, _unchanged)
    torch._dynamo.reset()
    got = play(sample, _compiler(sample, "treefx", {"inner": sample.inner}))
    found = [_compared(*item) for item in zip(wanted, wanted, got, strict=True)]
    if any(kind == "wrong" for kind, _ in found):  # or eager itself gives other numbers every time
        found = [_compared(*item) for item in zip(wanted, play(sample, _unchanged), got, strict=True)]
    differing = [i for i, (kind, _) in enumerate(found) if kind in ("wrong", "crashed")]
    if differing:
        torch._dynamo.reset()
        own = play(sample, _compiler(sample, "aot_eager", None))
        for i in differing:
            if _differs_alike(wanted[i], got[i], own[i]):
                found[i] = "torch", found[i][1]
    kinds = [kind for kind, _ in found]
    worst = next((kind for kind in ("wrong", "crashed", "torch", "rows", "nan") if kind in kinds), "invalid")
    note = "; ".join(f"sample {i}: {note}" for i, (kind, note) in enumerate(found) if kind == worst and note)
    return Outcome(worst, note, stats={"kinds": kinds})


def _unchanged(model: Any) -> Any:
    return model


def _compiler(sample: Sample, backend: str, options: Any) -> Callable[[Any], Any]:
    return lambda model: torch.compile(model, backend=backend, options=options, dynamic=sample.dynamic)


def _differs_alike(want: Seen, got: Seen, own: Seen) -> bool:
    """Whether ``aot_eager`` raises as treefx does, or differs from eager wherever treefx does."""
    if "error" in got or "error" in own:
        return "error" in got and "error" in own
    return differences(want, got).keys() <= differences(want, own).keys()


def _compared(want: Seen, again: Seen, got: Seen) -> tuple[str, str]:
    """The class of one call, and why."""
    if "error" in want:
        return "invalid", _first_line(want["error"])
    if "error" in got:
        return "crashed", _first_line(got["error"])
    unsure = set(differences(want, again))
    found = {name: text for name, text in differences(want, got).items() if name not in unsure}
    if found:
        return "wrong", ", ".join(f"{name}: {text}" for name, text in list(found.items())[:4])
    return "rows", ""


def differences(want: Seen, got: Seen) -> dict[str, str]:
    """What a caller sees differently, by name."""
    pairs = {name: (want.get(name, "absent"), got.get(name, "absent")) for name in {**want, **got}}
    found = {name: _difference(*pair) for name, pair in pairs.items()}
    return {name: text for name, text in found.items() if text}


def _difference(want: Any, got: Any) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(want) is type(got) and (want == got or want != want)
        return "" if same else f"{_shown(want)} became {_shown(got)}"
    if want.shape != got.shape or want.dtype is not got.dtype:
        return f"{_shown(want)} became {_shown(got)}"
    tolerance = _TOLERANCES.get(want.dtype)
    if want.dtype is torch.complex32:  # which equal has no kernel for
        want, got = want.to(torch.complex64), got.to(torch.complex64)
    if want.is_floating_point() and want.dtype.itemsize == 1:  # equal has no kernel for 8 bits
        want, got = want.float().nan_to_num(nan=-1e9), got.float().nan_to_num(nan=-1e9)
    if tolerance is None or not want.numel():
        return "" if torch.equal(want, got) else "other numbers"
    finite = want.isfinite()
    rest = (want == got) | (want.isnan() & got.isnan()) | finite
    scale = float(want[finite].abs().max()) if finite.any() else 0.0
    error = float((want[finite] - got[finite]).abs().max()) if finite.any() else 0.0
    near = error <= tolerance * max(scale, 1.0)
    return "" if near and bool(rest.all()) else f"off by {error:.1e} of {scale:.1e}"


def _shown(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else str(x)


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:300]}"
