"""Triton's interpreter without work that it repeats: a third of its processor seconds.

It replaces functions of ``triton.language`` before every launch, and does so again at each call of a device function;
it makes the table of NumPy's types at each operator, and checks every tensor's shape again. Results are the same.
"""

from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

__all__ = ["install"]


def install() -> None:
    """Replace the repeated work for the rest of this process, which runs nothing but interpreted kernels."""
    _patch_once_a_launch()
    _cache_numpy_types()
    _cache_block_types()
    _cache_shapes()


def _patch_once_a_launch() -> None:
    """Replace the names that a file of device functions sees once a launch; its end restores them."""
    launch, patched = interpreter.GridExecutor.__call__, set[int]()

    def start(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if (names := id(function.fn.__globals__)) not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(names)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = start
    interpreter.InterpretedFunction.__call__ = call_device_function


def _cache_numpy_types() -> None:
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        element = dtype.scalar
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    interpreter._get_np_dtype = numpy_type


def _cache_block_types() -> None:
    make = tl.block_type.__init__
    known: dict[tuple[Any, ...], Any] = {}

    def init(block: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple([core._unwrap_if_constexpr(size) for size in shape])
        if key not in known:
            make(block, element, shape)
            known[key] = dict(block.__dict__)
        block.__dict__.update(known[key], element_ty=element)

    tl.block_type.__init__ = init


def _cache_shapes() -> None:
    make = tl.tensor.__init__
    known: dict[tuple[Any, ...], Any] = {}

    def init(tensor: Any, handle: Any, dtype: Any) -> None:
        key = tuple(dtype.shape) if dtype.is_block() else ()
        if key not in known:
            make(tensor, handle, dtype)
            known[key] = {"shape": tensor.shape, "numel": tensor.numel}
        tensor.__dict__.update(known[key], handle=handle, type=dtype, dtype=dtype.scalar)

    tl.tensor.__init__ = init
