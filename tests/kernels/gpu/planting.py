"""Kernels generated from a changed template: what an earlier form or a mistake would compile to."""

from collections.abc import Iterator
from contextlib import contextmanager

import jinja2
import pytest

from treefx.kernels.gpu.triton_tree import codegen


def template(path: str) -> str:
    """Return the text of a path's template."""
    return (codegen._TEMPLATES / f"{path}.py.jinja").read_text(encoding="utf-8")


@contextmanager
def planted(path: str, text: str) -> Iterator[None]:
    """Generate the kernels of a path from this text instead of its template."""
    caches = codegen.kernel_source, codegen.kernel_module
    loaders = jinja2.DictLoader({f"{path}.py.jinja": text}), jinja2.FileSystemLoader(codegen._TEMPLATES)
    environment = codegen._environment().overlay(loader=jinja2.ChoiceLoader(loaders))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "_environment", lambda: environment)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
