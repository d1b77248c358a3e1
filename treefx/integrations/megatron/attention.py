"""Run core attentions of Megatron on a tree: ``DotProductAttention`` and TE's.

Both take query ``[N, 1, h, D]``, key and value ``[N, 1, g, D]`` with the heads of this tensor-parallel rank and return
``[N, 1, h * Dv]``; under sequence parallelism they see whole sequences. With any other mask than a tree, they run
unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.integrations.megatron.tree import is_tree
from treefx.kernels.api import tree_attention

__all__ = ["CORES", "TreeCore", "attentions", "is_te"]

LOCAL, TE = "DotProductAttention", "TEDotProductAttention"
CORES = (LOCAL, TE)
"""Classes of core attention that have a form on trees."""


def attentions(model: nn.Module) -> list[tuple[str, Any]]:
    """The attentions of a model, which have a core: (name, module)."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "core_attention")]


def is_te(core: nn.Module) -> bool:
    """Whether a core attention is Transformer Engine's."""
    return TE in {base.__name__ for base in type(core).__mro__}


class TreeCore:
    """Stands for the ``forward`` of a core attention.

    Args:
        attention: The module around it.
    """

    def __init__(self, attention: Any) -> None:
        core = attention.core_attention
        self.core, self._rows, self._own = core, core.forward, core.__dict__.get("forward")
        self._scale = _scale(attention, core)
        self._window = _window(core)
        self._deterministic = bool(getattr(core.config, "deterministic_mode", False))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_tree(attention_mask):
            return self._rows(query, key, value, attention_mask, *args, **kwargs)
        given = [name for name in ("attention_bias", "packed_seq_params") if kwargs.get(name) is not None]
        if given:
            raise UnsupportedError(_GIVEN.format(given[0]))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = tree_attention(
            q, k, v, attention_mask, scale=self._scale, window=self._window,
            sinks=getattr(self.core, "softmax_offset", None), deterministic=self._deterministic,
        )  # fmt: skip
        return out.permute(2, 0, 1, 3).flatten(2)

    def remove(self) -> None:
        """Give the core attention its own forward back."""
        self.core.__dict__.pop("forward", None)
        if self._own is not None:
            self.core.forward = self._own


def _scale(attention: Any, core: Any) -> float:
    """Return the factor of q.k.

    Transformer Engine keeps it in its backends, so this is the value that Megatron passed.
    """
    if not is_te(core):
        layer = core.scale_mask_softmax.scale  # of query-key layer scaling, which the core divides by before
        return float(core.softmax_scale * (1.0 if layer is None else layer))
    given = getattr(attention, "softmax_scale", None)
    given = getattr(attention.config, "softmax_scale", None) if given is None else given
    return float(attention.config.kv_channels**-0.5 if given is None else given)


def _window(core: Any) -> int | None:
    """Return the number of keys of its path that a query sees, itself included.

    Megatron counts those before it.
    """
    window = core.window_size if is_te(core) else core.scale_mask_softmax.window_size
    if not window or window[0] < 0:
        return None
    if window[1] > 0:
        raise UnsupportedError(f"treefx runs causal windows on a tree, got window_size {tuple(window)}; take (n, 0)")
    return int(window[0]) + 1


_GIVEN = (
    "on a tree an attention of Megatron computes causal attention inside of sequences, but it got {} too; call "
    "treefx.integrations.megatron.unconvert(model)"
)
