"""Options of the backend: ``torch.compile(model, backend="treefx", options={...})``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from treefx.errors import ConfigError
from treefx.passes.packing.compile_inner import Inner
from treefx.passes.pipeline import NECESSARY, OPTIONAL

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Fields are the options by name.

    What serves debugging is set from outside: with the environment variable ``TREEFX_DUMP_DIR``, a folder, the graph
    before and after every pass, their differences and the sources of generated kernels are written there; the variables
    of the kernels stand in ``treefx.kernels.gpu.triton_tree``.

    Raises:
        ConfigError: A value is not one of those its field takes.
    """

    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What compiles the rewritten graph."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """As ``torch.compile(mode=...)``, which sets it too: how inductor compiles. Other inner compilers have no modes."""
    min_sharing: float = 1.15
    """Sharing ratio (raw tokens / distinct tokens) below which a call runs the ordinary graph. 1.0: always pack."""
    on_unsupported: Literal["expand", "fallback", "error"] = "expand"
    """Where an operator has no token-wise law: expand what it reads, run the whole graph ordinarily, or raise."""
    padding: Literal["auto", "drop"] = "auto"
    """"auto": padding is left out only where nobody can see it. "drop": always; what is read there is zero."""
    max_logits: int = 2**26
    """Logits (tokens times vocabulary) above which LM head and loss run in chunks of the vocabulary; the logits are
    then only computed, by a second run, if somebody reads them."""
    lazy_outputs: bool = True
    """Whether outputs that nobody has read so far are left to be computed when somebody does, which is before the
    weights or inputs change. False: all are computed in their call, padding and large logits too."""
    max_shapes: int = 8
    """How many shapes [B, T] one graph keeps compiled packed where rows and columns have to be numbers. A further one
    runs the ordinary graph when it comes for the first time; when it comes again, it takes the place of the oldest."""
    regions: Literal["auto", True, False] = "auto"
    """Whether inductor compiles layers that are equal (four or more) once: Python works half as long on the first step,
    and each later step calls one more function per layer. "auto": on the CPU, for layers that are large beside that
    call. Other inner compilers compile every layer all the same."""
    disable_passes: tuple[str, ...] = ()
    """Names of passes to leave out, to find the one at fault: those of ``treefx.passes.pipeline.OPTIONAL``."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            _check(item.name, getattr(self, item.name), hints[item.name])
        if not self.min_sharing >= 1.0:  # also refuses NaN
            raise ConfigError(f"option 'min_sharing' must be a ratio of at least 1.0, got {self.min_sharing!r}")
        if self.mode != "default" and self.inner != "inductor":
            raise ConfigError(f"option 'mode' is of inner 'inductor', got {self.mode!r} with inner {self.inner!r}")
        object.__setattr__(self, "disable_passes", _check_passes(self.disable_passes))

    @property
    def compiler(self) -> Inner:
        """What compiles graphs."""
        return Inner(self.inner, self.mode)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Config:
        """The configuration for the ``options`` of ``torch.compile``.

        Raises:
            ConfigError: An option does not exist, or its value is not accepted.
        """
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(options or {}) - set(known))
        if unknown:
            raise ConfigError(
                f"backend 'treefx' has the options {', '.join(known)}; got {', '.join(map(repr, unknown))}"
            )
        return cls(**dict(options or {}))


def _check_passes(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"option 'disable_passes' must be a list of names, got {names!r}; write [{names!r}]")
    for name in names:
        if name in NECESSARY:
            raise ConfigError(f"option 'disable_passes': {name!r} cannot be left out: {NECESSARY[name]}")
        if name not in OPTIONAL:
            raise ConfigError(f"option 'disable_passes' takes names among {', '.join(OPTIONAL)}, got {name!r}")
    return tuple(sorted(set(names)))


def _check(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices and value not in choices:
        raise ConfigError(f"option {name!r} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(f"option {name!r} must be True or False, got {value!r}")
    numbers = {float: (int, float), int: (int,)}
    if hint in numbers and (not isinstance(value, numbers[hint]) or isinstance(value, bool)):
        raise ConfigError(f"option {name!r} must be a number ({hint.__name__}), got {value!r}")
