"""Options of the backend: ``torch.compile(model, backend="treefx", options={...})``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from treefx.errors import ConfigError

if TYPE_CHECKING:
    from treefx.passes.packing.compile_inner import Inner

__all__ = ["Config"]

_Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Hold the options of the backend.

    ``torch.compile(model, backend="treefx", options=...)`` takes a dict of these fields, or a ``Config``. A ``Config``
    checks its values when it is made; a dict is checked in the model's first call, when Dynamo passes it to the
    backend.

    For debugging, ``TREEFX_DUMP_DIR`` names a folder for dumps: the graph before and after every pass, their
    differences, and the sources of generated kernels. ``treefx.kernels.gpu.triton_tree`` lists the variables of the
    kernels.

    Attributes:
        inner: Compiler of the rewritten graph: "inductor", "aot_eager" or "eager". For experiments, "aot_eager"
            compiles in seconds; inductor takes a minute the first time.
        mode: Mode of inductor, also set by ``torch.compile(mode=...)``: "default", "reduce-overhead",
            "max-autotune" or "max-autotune-no-cudagraphs". Other inner compilers have no modes. With the second and
            third, inductor records CUDA graphs: packed rows are padded to one of a few lengths, and parts of a plan
            record none.
        min_sharing: Sharing ratio (raw tokens / distinct tokens) below which a call runs the ordinary graph. 1.0
            always packs.
        on_unsupported: Reaction to an operator without a token-wise law. "expand" expands its inputs to rows,
            "fallback" runs the whole graph on rows, "error" raises ``UnsupportedError``.
        padding: "auto" drops padding only where no result depends on it. "drop" always drops it; outputs at padding are
            zero.
        max_logits: Number of logits (tokens times vocabulary) above which LM head and loss run in chunks of the
            vocabulary. Reading the logits then runs the head a second time. "auto": 2^26 on the CPU; on a GPU, as many
            as fit into an eighth of the memory that is free at the first step.
        lazy_outputs: Expand packed outputs to rows lazily: on the first read, at the latest before weights or inputs
            change. False expands all of them in their call, including padding and large logits.
        max_shapes: Number of shapes [B, T] that one graph keeps compiled where B and T have to be constants. A further
            shape runs the ordinary graph the first time; the second time it replaces the oldest.
        regions: Let inductor compile equal layers (four or more) once: True, False or "auto". This halves the compile
            time in Python and adds one Python call per layer and step. "auto" does so on the CPU for layers that take
            much longer than that call. Other inner compilers compile every layer.
        observe: Count shared tokens and leave the calls unchanged: Dynamo's graph runs operator by operator, as under
            ``torch.compile(backend="eager")``, so no other option may be set. ``treefx.observed(model)`` returns the
            figures.
        disable_passes: Names of passes to skip when bisecting a fault, among ``treefx.passes.pipeline.OPTIONAL``.

    Raises:
        ConfigError: The type or value of a field is not accepted.
    """

    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    mode: _Mode = "default"
    min_sharing: float = 1.15
    on_unsupported: Literal["expand", "fallback", "error"] = "expand"
    padding: Literal["auto", "drop"] = "auto"
    max_logits: int | Literal["auto"] = "auto"
    lazy_outputs: bool = True
    max_shapes: int = 8
    regions: Literal["auto", True, False] = "auto"
    observe: bool = False
    disable_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            _check(item.name, getattr(self, item.name), hints[item.name])
        if not self.min_sharing >= 1.0:  # also refuses NaN
            raise ConfigError(f"option 'min_sharing' must be a ratio of at least 1.0, got {self.min_sharing!r}")
        for name in ("max_logits", "max_shapes"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ConfigError(f"option {name!r} must be at least 1, got {getattr(self, name)!r}")
        if self.mode != "default" and self.inner != "inductor":
            raise ConfigError(f"option 'mode' is of inner 'inductor', got {self.mode!r} with inner {self.inner!r}")
        object.__setattr__(self, "disable_passes", _check_passes(self.disable_passes))
        if self.observe:
            self._check_alone()

    def _check_alone(self) -> None:
        others = [item for item in fields(self) if item.name != "observe"]
        changed = [item.name for item in others if getattr(self, item.name) != item.default]
        if changed:
            raise ConfigError(
                f"option 'observe' changes nothing of a run, so it must be the only one, got {', '.join(changed)} too: "
                "leave them out, or observe"
            )

    @property
    def compiler(self) -> Inner:
        """Return the inner compiler with its mode."""
        from treefx.passes.packing.compile_inner import Inner  # loads inductor; options are checked without it

        return Inner(self.inner, self.mode)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | Config | None) -> Config:
        """Build the configuration from the ``options`` of ``torch.compile``.

        Args:
            options: Fields by name; or a ``Config``, which is returned.

        Raises:
            ConfigError: An option does not exist, or its value is not accepted.
        """
        if isinstance(options, Config):
            return options
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(options or {}) - set(known))
        if unknown:
            raise ConfigError(
                f"backend 'treefx' has the options {', '.join(known)}; got {', '.join(map(repr, unknown))}"
                + "".join(_of_inductor(name, options[name]) for name in unknown)  # type: ignore[index]
            )
        return cls(**dict(options or {}))


def _of_inductor(name: Any, value: Any) -> str:
    """Return advice on where a setting of inductor belongs; "" for other names."""
    from torch._inductor import list_mode_options, list_options  # loads inductor; options are checked without it

    if name not in list_options():
        return ""
    modes: Any = list_mode_options()
    setting = next((mode for mode in get_args(_Mode) if modes[mode].get(name, not value) == value), None)
    instead = f"torch._inductor.config.{name} = {value!r} before the model's first call"
    return f". {name!r} is a setting of inductor: use {f'the option mode={setting!r} or ' if setting else ''}{instead}"


def _check_passes(names: Any) -> tuple[str, ...]:
    if names == ():
        return ()
    from treefx.passes.pipeline import NECESSARY, OPTIONAL  # loads inductor; options are checked without it

    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"option 'disable_passes' must be a list of names, got {names!r}; write [{names!r}]")
    for name in names:
        if name in NECESSARY:
            raise ConfigError(f"option 'disable_passes': {name!r} cannot be left out: {NECESSARY[name]}")
        if name not in OPTIONAL:
            raise ConfigError(f"option 'disable_passes' takes names among {', '.join(OPTIONAL)}, got {name!r}")
    return tuple(sorted(set(names)))


def _check(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) in (Union, UnionType):
        words, hint = sorted(get_args(hint), key=lambda item: item is int)
        if isinstance(value, str) and value in get_args(words):
            return
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices and value not in choices:
        raise ConfigError(f"option {name!r} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(f"option {name!r} must be True or False, got {value!r}")
    numbers = {float: (int, float), int: (int,)}
    if hint in numbers and (not isinstance(value, numbers[hint]) or isinstance(value, bool)):
        raise ConfigError(f"option {name!r} must be a number ({hint.__name__}), got {value!r}")
