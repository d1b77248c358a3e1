"""PyTorch's tables of operators and modules, and the programs that call each of them.

The tables lie in ``torch.testing._internal`` of PyTorch's wheel and are no public interface.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from treefx.tools.fuzz.samples.sample import FORMS, INPUTS, INPUTS_IN_PLACE, Sample

__all__ = ["draw_samples", "find_module", "find_operator", "module_samples", "operator_samples"]

_MOST = 2
"""Samples of an operator that one program calls."""
_LOOKED_AT = 40
"""Samples of an operator among which one with an empty or one-element tensor is looked for."""
_DTYPES = {"float64": torch.float64, "complex128": torch.complex128, "int64": torch.int64, "float32": torch.float32}
_UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that leave their results uninitialized."""
_RARE = 0.1
"""The share of programs with complex numbers, and of those with integers, where an operator has them."""


def draw_samples(seed: int, inner: str = "") -> list[Sample]:
    """All programs of a search in an order drawn from its seed.

    Args:
        seed: Also draws dtypes, kinds of inputs and inner compilers.
        inner: The inner compiler of all programs; "" draws it.
    """
    drawn = [item for item in itertools.chain(_of_operators(seed), _of_modules(seed))]
    random.Random(seed).shuffle(drawn)
    return [replace(item, seed=number, inner=inner or item.inner) for number, item in enumerate(drawn)]


def _of_operators(seed: int) -> Iterator[Sample]:
    for name, operator in _operators().items():
        if name in _UNINITIALIZED:
            continue
        has = {"function": True, "in place": operator.get_inplace(), "out": operator.supports_out}
        for form in (form for form in FORMS if has.get(form)):
            rng = random.Random(f"{seed}/{name}/{form}")
            dtype = _draw_dtype(operator.supported_dtypes("cpu"), rng)
            kinds = {"in place": INPUTS_IN_PLACE, "out": ("no_grad",)}.get(form, INPUTS)
            yield from _two_modes(name, form, dtype, rng.choice(kinds), rng)


def _of_modules(seed: int) -> Iterator[Sample]:
    for name in _modules():
        for form in ("training", "evaluation"):
            rng = random.Random(f"{seed}/{name}/{form}")
            yield from _two_modes(name, form, "float64", rng.choice(INPUTS[:-1]), rng)


def _two_modes(name: str, form: str, dtype: str, inputs: str, rng: random.Random) -> Iterator[Sample]:
    for dynamic in (False, True):
        yield Sample(0, name, form, dtype, inputs, dynamic, rng.choice(("eager", "aot_eager", "aot_eager")))


def _draw_dtype(supported: Any, rng: random.Random) -> str:
    names = [name for name, dtype in _DTYPES.items() if dtype in supported]
    drawn, share = rng.choice(names[1:] or names or [""]), rng.random()
    if names and names[0] == "float64" and share > 2 * _RARE:
        return "float64"
    return drawn or min(str(dtype).removeprefix("torch.") for dtype in supported or [torch.float32])


def operator_samples(operator: Any, dtype: str, *, in_place: bool = False) -> list[Any]:
    """Return an operator's sample with several elements, and one empty or of one element.

    ``in_place`` leaves out those whose result would not fit into the input.
    """
    number: torch.dtype = getattr(torch, dtype)
    learned = operator.supports_autograd and (number.is_floating_point or number.is_complex)
    drawn = list(itertools.islice(operator.sample_inputs("cpu", number, requires_grad=learned), _LOOKED_AT))
    drawn = [item for item in drawn if not (in_place and item.broadcasts_input)]
    small = [item for item in drawn if any(x.numel() <= 1 for x in _sized(item))]
    large = [item for item in drawn if _sized(item) and all(item is not other for other in small)]
    chosen = {id(item): item for item in [*large[:1], *small[:1], *drawn]}
    return list(chosen.values())[:_MOST]


def _sized(sample: Any) -> list[Tensor]:
    """The tensors of a sample that have dimensions."""
    tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    return [x for x in tensors if x.layout is torch.strided and x.dim()]


def module_samples(module: Any, dtype: str, *, training: bool) -> list[Any]:
    """Samples of a module: how it is made, and what it is called with."""
    number: torch.dtype = getattr(torch, dtype)
    found = module.module_inputs_func(module, device="cpu", dtype=number, requires_grad=True, training=training)
    return [item for item in found if item.forward_input is not None][:_MOST]


def find_operator(name: str) -> Any:
    """The entry of an operator; None where this name is one of a module."""
    return _operators().get(name)


def find_module(name: str) -> Any:
    """The entry of a module."""
    return _modules()[name]


@functools.cache
def _operators() -> dict[str, Any]:
    table = _import_table("common_methods_invocations").op_db
    return {f"{item.name}.{item.variant_test_name}".rstrip("."): item for item in table}


@functools.cache
def _modules() -> dict[str, Any]:
    return {f"module {item.name}": item for item in _import_table("common_modules").module_db}


def _import_table(name: str) -> Any:
    """Import a table; what else the import does to the process is undone."""
    flags, frozen = vars(torch.backends), "__allow_nonbracketed_mutation_flag"
    before = flags.get(frozen)
    try:
        with _without_expecttest(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torch.testing._internal.{name}")
    finally:
        flags[frozen] = before


@contextmanager
def _without_expecttest() -> Iterator[None]:
    """Stand in for ``expecttest``, which PyTorch's tables import and do not use."""
    if "expecttest" in sys.modules:
        yield
        return
    module: Any = ModuleType("expecttest")
    module.TestCase = unittest.TestCase
    sys.modules["expecttest"] = module
    try:
        yield
    finally:
        del sys.modules["expecttest"]
