"""The runs: a trainer, its settings, and what its user writes for treefx."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "TrlCase"]

_COMPILED = 'torch_compile_backend="treefx"'


@dataclass(frozen=True, kw_only=True)
class TrlCase:
    """One trainer, set up in one way."""

    name: str
    method: str
    """"sft", "dpo", "kto", "grpo" or "rloo"; "trainer" is transformers' own, with rows one behind another."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Arguments of the trainer, as pairs."""
    adapter: bool = False
    """Whether LoRA adapters are trained."""
    grouped: bool = True
    """Whether rows that share prefixes are put into one batch; packed ones keep their order, as KTO's must."""
    way: str = "treefx"
    """"eager", or the backend."""
    folder: str = ""
    """Where model and rows lie."""

    @property
    def package(self) -> str:
        """Whose trainer it is."""
        return "transformers" if self.method == "trainer" else "trl"

    @property
    def write(self) -> str:
        """What its user writes."""
        return f"{_COMPILED}; keep_groups(trainer)" if self.grouped else _COMPILED

    @property
    def samples(self) -> bool:
        """Whether it generates its rows itself."""
        return self.method in ("grpo", "rloo")


_CHECKPOINTS = {"gradient_checkpointing": True}
_PACKED = {"packing": True, "max_length": 4096, "per_device_train_batch_size": 1}


def _case(name: str, settings: Mapping[str, Any] | None = None, **more: Any) -> TrlCase:
    return TrlCase(name=name, method=name.partition(",")[0], settings=tuple((settings or {}).items()), **more)


CASES = {
    case.name: case
    for case in (
        _case("sft"),
        _case("sft, checkpoints", _CHECKPOINTS),
        _case("sft, packing", _PACKED, grouped=False),
        _case("sft, padding free", {"padding_free": True}),
        _case("sft, lora", adapter=True),
        _case("dpo"),
        _case("dpo, checkpoints", _CHECKPOINTS),
        _case("dpo, lora", adapter=True),
        _case("kto", grouped=False),
        _case("kto, checkpoints", _CHECKPOINTS, grouped=False),
        _case("grpo"),
        _case("grpo, checkpoints", _CHECKPOINTS),
        _case("grpo, lora", adapter=True),
        _case("rloo"),
        _case("rloo, checkpoints", _CHECKPOINTS),
        _case("trainer, flattening"),
    )
}
"""By name. ``use_liger_kernel`` is not among them: its functions are Triton kernels, which no processor runs."""
