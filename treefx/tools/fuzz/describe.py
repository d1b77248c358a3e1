"""Describe a program in one line: its parts besides a plain model and step."""

from __future__ import annotations

from treefx.tools.fuzz.program import Attention, Program

__all__ = ["describe"]

_PLAIN = {"head": "linear", "loss": "cross entropy", "labels": "padding ignored", "output": "loss and logits"}


def describe(program: Program) -> str:
    """Embeddings, layers, head and loss, inner compiler, calls; plain parts are left out."""
    parts = [name for name in program.embeddings if name != "embedding"]
    parts += [_attention(layer) if isinstance(layer, Attention) else layer.name for layer in program.layers]
    parts += [f"{name} {getattr(program, name)}" for name, plain in _PLAIN.items() if getattr(program, name) != plain]
    parts += program.modes
    calls = ", then ".join(call.name for call in program.calls)
    shapes = dict.fromkeys(f"[{len(batch.ids)}, {len(batch.ids[0])}]" for batch in program.batches)
    return f"{'; '.join(parts)}; inner {program.inner}; {' and '.join(shapes)}: {calls}"


def _attention(layer: Attention) -> str:
    spelled = [layer.spelling] if layer.spelling != "sdpa" else []
    spelled += [f"{layer.written} {layer.fill}"] if (layer.written, layer.fill) != ("bool", "-inf") else []
    return f"attention ({' & '.join(layer.conditions)}{''.join(f', {item}' for item in (*layer.terms, *spelled))})"
