"""Judge a program: run it eagerly in float64 and compiled, and compare everything.

A value is judged by its largest difference over its largest entry; a gradient that is small next to the largest one of
its step is judged against that, and against the loss where all of them are rounding. In float32 and bfloat16 the
compiled run may be as far from float64 as eager is, up to a factor.
"""

from __future__ import annotations

import linecache
import re
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import treefx
from treefx.errors import TreefxError
from treefx.tools.fuzz.program import Program
from treefx.tools.fuzz.script import is_native, parts_of, script

__all__ = ["CLASSES", "FAILURES", "Outcome", "errors_of", "judge", "least_share", "low_casts_explain", "player"]

CLASSES = ("exact", "expanded", "rows", "refused", "nan", "torch", "invalid", "crashed", "hung", "wrong")
"""What may become of a program. "torch": torch's own backend differs from eager, or refuses, in the same way."""
FAILURES = ("crashed", "hung", "wrong")

_TOLERANCE = 1e-10
_SMALL = 1e-4
"""Gradients below this share of the largest one of their step are judged against it."""
_SMALL_SINGLE = torch.finfo(torch.float32).eps / 1e-5
"""The same in float32: of a smaller share, the tolerance is below the rounding of the largest gradient."""
_CANCELLED = 1e-12
"""Where no gradient reaches this share of the loss, the weights do not matter: they are judged against the loss."""
_STEEP = 1.0
"""The same where scores are scaled up, and with them the rounding of a softmax that is nearly one key."""
_ROUNDING = 6.0
"""How much further from float64 than eager a run in low precision may be: the programs are small, errors few."""
_ROUNDED, _SENSITIVE = 1e-4, 30.0
"""Errors below the first may be rounding that a badly conditioned program blows up: it is asked what it makes of it."""
_LEAST = {"float32": 1e-5, "autocast": 3e-2}
"""Tolerance in low precision where eager happens to be nearer."""
_COARSE = 1e-2
"""Gradients below this share of the largest one may be the rounding of bfloat16 where their terms cancel."""
Seen = dict[str, Tensor]
Compiler = Callable[[Any], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    kind: str
    note: str = ""
    """Why: the error, what differs, or what was expanded."""
    error: float = 0.0
    """Largest relative difference."""
    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON writes it."""
        return asdict(self)


def judge(program: Program) -> Outcome:
    """Run a program and say what became of it."""
    start = time.perf_counter()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _judge(program)
    return Outcome(found.kind, found.note, found.error, time.perf_counter() - start, found.stats)


def _judge(program: Program) -> Outcome:
    play = player(program)
    low = next((mode for mode in program.modes if mode in _LEAST), None)
    dtype = torch.float64 if low is None else torch.float32
    try:
        want = play(lambda model: model)
        eager = want if low is None else play(lambda model: model, dtype)
    except Exception as error:
        return Outcome("invalid", _first_line(error))
    watch = _Watch(program)
    try:
        got = play(watch.compile, dtype)
    except Exception as error:
        return _failed(program, play, dtype, error)
    return _compared(program, play, dtype, want, eager, got, watch)


def player(program: Program, casts: str = ".float()") -> Callable[..., Seen]:
    """Load the function ``play`` of a program's script, with lines for tracebacks.

    ``casts`` are written for the program's own casts to float32.
    """
    text, name = script(program).replace(".float()", casts), f"<program {program.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("treefx_fuzz_program")
    sys.modules[module.__name__] = module  # Dynamo imports it where it traces from another module
    exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102
    play: Callable[..., Seen] = module.__dict__["play"]
    return play


def _failed(program: Program, play: Callable[..., Seen], dtype: torch.dtype, error: Exception) -> Outcome:
    refusal = _refusal(error)
    if refusal is not None:
        return Outcome("refused", f"{type(refusal).__name__}: {_first_line(refusal)}")
    if _has_twin(program) and (own := _own_failure(program, play, dtype)) is not None:
        return Outcome("torch", f"{type(error).__name__}: {_first_line(error)}; torch's own: {own}")
    return Outcome("crashed", f"{type(error).__name__}: {_first_line(error)}")


def _has_twin(program: Program) -> bool:
    """Return whether torch's own backends can run a program: no forests, plans, conversions."""
    return not is_native(program) and not any(call.name.startswith("converted") for call in program.calls)


def _own_failure(program: Program, play: Callable[..., Seen], dtype: torch.dtype) -> str | None:
    """Return the error of torch's own backend on the program; aot_eager stands for eager."""
    torch._dynamo.reset()
    try:
        play(_own(program), dtype)
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return None


def _own(program: Program) -> Compiler:
    backend = "inductor" if program.inner == "inductor" else "aot_eager"
    dynamic = True if "dynamic" in program.modes else None
    return lambda model: torch.compile(model, backend=backend, dynamic=dynamic)


def _refusal(error: BaseException | None) -> TreefxError | None:
    """What treefx raised on purpose, alone or wrapped by Dynamo."""
    while error is not None and not isinstance(error, TreefxError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:300]


def _compared(
    program: Program, play: Callable[..., Seen], dtype: torch.dtype, want: Seen, eager: Seen, got: Seen, watch: _Watch
) -> Outcome:
    if any(not value.isfinite().all() for name, value in want.items() if "loss" in name or "gradient" in name):
        return Outcome("nan", "eager is not finite", stats=watch.stats)
    errors, allowed = errors_of(got, want, least_share(program)), _allowed(program, eager, want)
    if allowed < max(errors.values(), default=0.0) < _ROUNDED:
        allowed = max(allowed, _SENSITIVE * max(errors_of(play(_nudged, dtype), want).values()))
    wrong = {name: error for name, error in errors.items() if not error <= allowed}
    largest = max(errors.values(), default=0.0)
    explains = low_casts_explain if _has_trait(program, "single") else autocast_explains
    if not wrong or explains(program, eager, got, _Watch(program).compile):
        return Outcome(watch.kind, watch.note, largest, stats=watch.stats)
    listed = "; ".join(f"{name}: {error:.1e}" for name, error in sorted(wrong.items(), key=lambda item: -item[1])[:4])
    if _has_twin(program) and _torch_differs(program, play, dtype, want, allowed, set(wrong)):
        return Outcome("torch", f"torch's own backend differs from eager too: {listed}", largest, stats=watch.stats)
    return Outcome("wrong", listed, largest, stats=watch.stats)


def low_casts_explain(program: Program, eager: Seen, got: Seen, compile: Compiler) -> bool:
    """Whether the differences of a program in float64 come from its casts to float32 alone.

    With the casts lifted it must be exact, and unchanged no further from that than eager is, up to the factor of
    runs in low precision.
    """
    lifted = player(program, casts=".double()")
    exact = lifted(lambda model: model)
    torch._dynamo.reset()
    if not max(errors_of(lifted(compile), exact).values()) <= _TOLERANCE:
        return False
    return max(errors_of(got, exact).values()) <= _ROUNDING * max(errors_of(eager, exact).values())


def autocast_explains(program: Program, eager: Seen, got: Seen, compile: Compiler) -> bool:
    """Return whether autocast explains the differences as rounding.

    Without autocast it must be exact, and with it, small gradients are judged against a larger share of the largest.
    """
    if "autocast" not in program.modes:
        return False
    play = player(program, casts=".double()")
    exact = play(lambda model: model)
    torch._dynamo.reset()
    if not max(errors_of(play(compile), exact).values()) <= _TOLERANCE:
        return False
    errors, own = errors_of(got, exact, _COARSE), errors_of(eager, exact, _COARSE)
    return max(errors.values()) <= max(_LEAST["autocast"], _ROUNDING * max(own.values()))


def least_share(program: Program) -> float:
    """The share of the largest gradient against which smaller ones are judged."""
    if _has_trait(program, "steep"):
        return _STEEP
    return _SMALL_SINGLE if "float32" in program.modes else _SMALL


def _nudged(model: Any) -> Any:
    """Perturb all weights by rounding, which shows how far a program can be judged."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    return model


def _allowed(program: Program, eager: Seen, want: Seen) -> float:
    low = next((mode for mode in program.modes if mode in _LEAST), None)
    if low is None:
        rounding = ("single", "angles") if program.inner == "inductor" else ("single",)
        return _LEAST["float32"] if _has_trait(program, *rounding) else _TOLERANCE
    return max(_LEAST[low], _ROUNDING * max(errors_of(eager, want).values(), default=0.0))


def _has_trait(program: Program, *traits: str) -> bool:
    return any(trait in part.traits for part in parts_of(program) for trait in traits)


def _torch_differs(
    program: Program, play: Callable[..., Seen], dtype: torch.dtype, want: Seen, allowed: float, names: set[str]
) -> bool:
    torch._dynamo.reset()
    try:
        own = play(_own(program), dtype)
    except Exception:
        return False
    errors = errors_of(own, want)
    return all(not errors[name] <= allowed for name in names if name in errors)


def errors_of(got: Seen, want: Seen, small: float = _SMALL) -> dict[str, float]:
    """Return relative differences of everything seen; infinite if one side lacks a value.

    Gradients below a share ``small`` of the largest one of their step are judged against that share.
    """
    scales = {step: _scale_of(step, want) for step in {name.split(" ")[0] for name in {**want, **got}}}
    floors = {name: small * scales[name.split(" ")[0]] if "gradient" in name else 0.0 for name in {**want, **got}}
    return {name: _relative(got.get(name), want.get(name), floor) for name, floor in floors.items()}


def _scale_of(step: str, want: Seen) -> float:
    """The largest gradient of a step; its loss where all gradients cancel."""
    seen = {name: value for name, value in want.items() if name.split(" ")[0] == step and value.numel()}
    gradients = [float(value.double().abs().max()) for name, value in seen.items() if "gradient" in name]
    losses = [float(value.double().abs().max()) for name, value in seen.items() if name.endswith("loss")]
    largest, loss = max(gradients, default=0.0), max(losses, default=0.0)
    return largest if largest > _CANCELLED * loss else loss


def _relative(got: Tensor | None, want: Tensor | None, floor: float) -> float:
    if got is None or want is None or got.shape != want.shape:
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    finite = want.isfinite()
    same = (got == want) | (got.isnan() & want.isnan())
    if not bool((same | finite).all()):  # eager has infinities or NaN there: in read values, not in loss and gradients
        got, want, same = got[finite], want[finite], same[finite]
    if bool(same.all()) or not want.numel():
        return 0.0
    difference = float(torch.where(same, 0.0, got - want).abs().max())
    scale = max(float(want[want.isfinite()].abs().max()), floor)
    return difference / scale if difference == difference and scale else float("inf")


class _Watch:
    """Compiles models and remembers how their calls ran."""

    def __init__(self, program: Program) -> None:
        self._options: dict[str, Any] = {"inner": program.inner}
        if "default sharing" not in program.modes:
            self._options["min_sharing"] = 1.0
        self._dynamic = True if "dynamic" in program.modes else None
        self._plans = any("plan" in call.name for call in program.calls)
        self.stats: dict[str, Any] = {}
        self.kind, self.note = "rows", "nothing was compiled"

    def compile(self, model: Any) -> Callable[..., Any]:
        """The compiled model, called and watched."""
        compiled: Any = torch.compile(model, backend="treefx", options=self._options, dynamic=self._dynamic)
        if self._plans:  # treefx.backward wants the compiled model itself
            self.kind, self.note = "exact", ""
            return compiled  # type: ignore[no-any-return]

        def call(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            self._note(compiled)
            return result

        return call

    def _note(self, compiled: Any) -> None:
        """The best that a call of the program reached: it is what the laws were asked for."""
        try:
            stats = treefx.inspect(compiled).stats
        except TreefxError:
            return
        names = ("tokens", "raw_tokens", "attention_rewritten", "recurrences_rewritten", "fallback", "expansions")
        found = {name: stats.get(name) for name in names}
        kind, note = _way(found)
        if not self.stats or CLASSES.index(kind) < CLASSES.index(self.kind):
            self.kind, self.note = kind, note
            self.stats = found | {"expansions": [item["op"] for item in found["expansions"] or ()]}


def _way(stats: dict[str, Any]) -> tuple[str, str]:
    if stats["fallback"]:
        return "rows", re.sub(r" \([^()]*line \d+[^()]*\)", "", str(stats["fallback"]))
    if not stats["tokens"]:
        return "rows", "no graph of tokens"
    if stats["expansions"]:
        return "expanded", ", ".join(sorted({item["op"] for item in stats["expansions"]}))
    return "exact", ""
