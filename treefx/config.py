"""Options of the backend: ``torch.compile(model, backend="treefx", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from treefx.errors import ConfigError

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Fields are the options by name.

    Raises:
        ConfigError: A value is not one of those its field takes.
    """

    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What compiles the rewritten graph."""
    min_sharing: float = 1.15
    """Sharing ratio (raw tokens / distinct tokens) below which a call runs the ordinary graph. 1.0: always pack."""
    on_unsupported: Literal["expand", "fallback", "error"] = "expand"
    """Where an operator has no token-wise law: expand what it reads, run the whole graph ordinarily, or raise."""
    padding: Literal["auto", "drop"] = "auto"
    """"auto": padding is left out only where nobody can see it. "drop": always; what is read there is zero."""
    max_shapes: int = 8
    """How many shapes [B, T] one graph keeps compiled packed; beyond that, new shapes run the ordinary graph."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            _check(item.name, getattr(self, item.name), hints[item.name])
        if not self.min_sharing >= 1.0:  # also refuses NaN
            raise ConfigError(f"option 'min_sharing' must be a ratio of at least 1.0, got {self.min_sharing!r}")

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


def _check(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint)
    if choices and value not in choices:
        raise ConfigError(f"option {name!r} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    numbers = {float: (int, float), int: (int,)}
    if hint in numbers and (not isinstance(value, numbers[hint]) or isinstance(value, bool)):
        raise ConfigError(f"option {name!r} must be a number ({hint.__name__}), got {value!r}")
