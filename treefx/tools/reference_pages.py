"""Pages made from tables of the code: the options of the backend, and the patches of PyTorch.

``python -m treefx.tools.reference_pages docs`` (``make docs``) writes ``options.md`` and ``pytorch-patches.md``.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from treefx.config import Config
from treefx.passes.pipeline import OPTIONAL
from treefx.torch_patches.table import PATCHES

__all__ = ["PAGES", "options_page", "patches_page"]

_OPTIONS_HEAD = """# Options

`torch.compile(model, backend="treefx", options={...})` takes these by name, as does `model.compile`. A `treefx.Config`
with the same fields may replace the dict. Unknown names and wrong values raise `treefx.ConfigError`.

This page is made from `treefx.Config` by `make docs`.

| option | default | values | effect |
| --- | --- | --- | --- |
"""
_OPTIONS_TAIL = """
## Passes that may be left out

`options={"disable_passes": ["contract"]}` leaves a pass out, to find one at fault. Results stay exact.

| pass | without it |
| --- | --- |
"""
_VARIABLES = """
## Environment variables

| variable | effect |
| --- | --- |
| `TREEFX_DUMP_DIR` | a folder: graphs before and after every pass, their differences, sources of generated kernels |
| `TREEFX_CACHE_DIR` | a folder: tuned configurations of kernels |
| `TREEFX_KERNEL_PATH` | `plain`, `gluon` or `gluon_once`: the form of generated kernels |
| `TREEFX_CHECK` | a number n: compare every n-th attention with the reference on 64 of its queries |
| `TREEFX_TUNE` | `1`: time configurations per kind of attention |
"""
_PATCHES_HEAD = """# PyTorch patches

Loading the backend replaces some symbols of PyTorch and transformers, so that models and trainers are captured as whole
graphs. Each replacement acts only where treefx compiles. `treefx doctor --patches` prints this table.

While treefx compiles, flash attention of transformers, functions of flash attention, and TRL's LM head without logits
are traced as one operator each. Liger's norms, rotary embeddings, gated products and fused linear cross entropy are
traced as plain operators, where they compute the same on a small example. Liger's own kernels have not run with treefx
yet. A hook on PyTorch's optimizers counts their steps.

This page is made from `treefx/torch_patches/table.py` by `make docs`. The last column names a test that fails without
the patch.

| symbol | versions | without it | test |
| --- | --- | --- | --- |
"""


def options_page() -> str:
    """The page of the fields of ``treefx.Config``, from its docstring."""
    rows = [
        f"| `{item.name}` | `{item.default!r}` | {_values_of(item.name)} | {text} |"
        for item, text in zip(fields(Config), _attributes().values(), strict=True)
    ]
    passes = [f"| `{name}` | {effect} |" for name, effect in OPTIONAL.items()]
    return _OPTIONS_HEAD + "\n".join(rows) + "\n" + _OPTIONS_TAIL + "\n".join(passes) + "\n" + _VARIABLES


def patches_page() -> str:
    """The page of the table of patches."""
    rows = [f"| `{item.symbol}` | {item.versions} | {item.why} | `{item.test}` |" for item in PATCHES]
    return _PATCHES_HEAD + "\n".join(rows) + "\n"


PAGES = {"options.md": options_page, "pytorch-patches.md": patches_page}


def _attributes() -> dict[str, str]:
    """The text of each field in the docstring of ``Config``; its order is that of the fields."""
    section = inspect.cleandoc(Config.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    texts = {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
    assert list(texts) == [item.name for item in fields(Config)], "the docstring of Config lists its fields in order"
    return {name: text.replace("``", "`") for name, text in texts.items()}


def _values_of(name: str) -> str:
    hint: Any = get_type_hints(Config)[name]
    words = [part for item in (get_args(hint) or (hint,)) for part in (get_args(item) or (item,))]
    named = [item.__name__ if isinstance(item, type) else repr(item) for item in words if item is not ...]
    return ", ".join(f"`{name}`" for name in named)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for file, make in PAGES.items():
        (folder / file).write_text(make(), encoding="utf-8")
