"""Patch PyTorch's tracing of symbolic sizes."""

from __future__ import annotations

import functools
import operator
from typing import Any

import sympy
from torch.fx.experimental import proxy_tensor

__all__ = ["write_products_whole"]


@functools.cache
def write_products_whole() -> None:
    """Let PyTorch write a product of three sizes as two products.

    A size that a graph has not computed yet is put together from those that it has. PyTorch takes ``operator.mul`` for
    a product of however many; the code of such a node is ``2 * rows``, where ``2 * rows * columns`` is meant.
    """
    original = getattr(proxy_tensor, "_build_proxy_for_sym_expr", None)
    register = getattr(proxy_tensor, "_sym_register", None)
    if original is None or register is None:  # another version of torch, with graphs that are searched as well
        return

    @functools.wraps(original)
    def build(tracer: Any, expr: Any, out: Any = None) -> Any:
        is_known = tracer.sympy_expr_tracker.get(expr) is not None
        if is_known or not isinstance(expr, sympy.Mul) or len(expr.args) < 3:
            return original(tracer, expr, out)
        factors = [build(tracer, arg) for arg in expr.args]
        if any(factor is None for factor in factors):
            return None
        first = functools.reduce(operator.mul, factors[:-1])
        if out is None:
            return first * factors[-1]
        register(tracer, operator.mul, (first, factors[-1]), out)
        return out

    proxy_tensor._build_proxy_for_sym_expr = build
