"""Prove on examples that a module computes token by token.

The law ``y[n] = f(x[n]; w)`` holds if no token depends on another one and no state does. Code does not show either, so
the module runs on random hidden states:

- the derivative of some tokens' results by all other tokens is zero in every element;
- results stay the same where tokens are alone, in another order, or in other rows and columns;
- equal tokens have equal results where all tokens are equal, so that all choose the same experts. A capacity per
  expert would drop some of them;
- no random numbers are drawn, and no buffer, attribute or input changes;
- every trained parameter takes part in the result of any token. In eager mode, experts that are modules of their own
  have no gradient where no token chose them, and an operator could return zeros only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode

from treefx.passes.trace.token_modules import ModuleResult, TokenModule, call_module
from treefx.torch_patches.compiling import keeping_no_casts, running_eagerly

__all__ = ["prove_token_module"]

_ROWS, _COLUMNS = 2, 10
_EQUAL = 512
"""Tokens of the example in which all are equal."""
_CAPACITY = "capacity"
"""A module with an attribute or variable of such a name is refused: a large capacity shows in large batches only."""
_EXACT, _ROUNDED = 256, 16
"""Largest relative difference in units of rounding: of float32 and float64, and of shorter numbers."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")


class _Refuted(Exception):
    """The law does not hold, or nothing shows that it does."""


def prove_token_module(
    module: nn.Module, width: int, dims: int, dtype: torch.dtype, autocast: torch.dtype | None
) -> TokenModule | None:
    """Return the description of a module that computes token by token; None if it is not proved to.

    Args:
        module: Called with hidden states [tokens, width] or [rows, columns, width] alone.
        width: Of the hidden states.
        dims: How many dimensions they have, 2 or 3.
        dtype: Of their elements.
        autocast: The dtype of autocast around the call; None without autocast.
    """
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    hooks = any(getattr(item, name) for item in module.modules() for name in _HOOKS)
    plain = all(type(x) in (Tensor, nn.Parameter) and x.device.type != "meta" for x in held.values())
    if hooks or not plain or _names_capacity(module) or len({x.device for x in held.values()}) != 1:
        return None
    (device,) = {x.device for x in held.values()}
    example = torch.randn(_ROWS * _COLUMNS, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        with (
            unset_fake_temporarily(),
            running_eagerly(),
            keeping_no_casts(),
            torch.enable_grad(),
            _unchanged(module, device),
        ):
            return _prove(module, held, example, dims, autocast)
    except (_Refuted, RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
        return None


def _prove(
    module: nn.Module, held: Mapping[str, Tensor], example: Tensor, dims: int, autocast: torch.dtype | None
) -> TokenModule:
    """Return the description of a module.

    Raises:
        _Refuted: It does not compute token by token.
    """

    def run(tokens: Tensor) -> list[Tensor]:
        shaped = tokens[None] if dims > tokens.dim() else tokens
        found = call_module(module, held, shaped, autocast)
        return [_in_line(y, shaped.shape[:-1]) for y in ([found] if isinstance(found, Tensor) else found)]

    rows = example.view(_ROWS, _COLUMNS, -1) if dims > example.dim() else example
    x = rows.clone().requires_grad_()
    with FlopCounterMode(display=False) as flops:
        found = call_module(module, held, x, autocast)
    results = [found] if isinstance(found, Tensor) else found
    forms = tuple(_form(y, rows.shape[:-1]) for y in results)
    if not forms or not torch.equal(x, rows):
        raise _Refuted
    lines = [_in_line(y, rows.shape[:-1]) for y in results]
    _check_gradients(lines, x)
    _check_parameters(run(example[:1]), [item for item in held.values() if item.requires_grad])
    with torch.no_grad():
        for places in ([0], [2, 17, 5], [*range(len(example))][::-1]):
            _check_equal(run(example[places]), [line[places] for line in lines])
        equal = example[:1].expand(_EQUAL, -1).contiguous()
        _check_equal(run(equal), [line[:1].expand(_EQUAL, *line.shape[1:]) for line in lines])
    per_token = flops.get_total_flops() / len(example)
    return TokenModule(ref(module), tuple(held), forms, isinstance(found, Tensor), autocast, per_token)


def _names_capacity(module: nn.Module) -> bool:
    classes = {
        cls for item in module.modules() for cls in type(item).__mro__ if not cls.__module__.startswith("torch.")
    }
    codes = [getattr(value, "__code__", None) for cls in classes for value in vars(cls).values()]
    names = {name for code in codes if code is not None for name in (*code.co_names, *code.co_varnames)}
    names |= {name for item in module.modules() for name in vars(item)}.union(*map(vars, classes))
    return any(_CAPACITY in name.lower() for name in names)


def _form(y: Any, front: torch.Size) -> ModuleResult:
    """Return the form of a result for hidden states [*front, D]."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise _Refuted
    if y.shape[:-1] == front:
        return ModuleResult(False, tuple(y.shape[-1:]), y.dtype)
    if y.dim() == 2 and y.shape[0] == math.prod(front):
        return ModuleResult(True, tuple(y.shape[1:]), y.dtype)
    raise _Refuted


def _in_line(y: Tensor, front: torch.Size) -> Tensor:
    """A result as [tokens, features]."""
    return y.reshape(math.prod(front), -1)


def _check_gradients(lines: Sequence[Tensor], x: Tensor) -> None:
    """Check that results depend on the hidden states of their own tokens alone."""
    count = lines[0].shape[0]
    ours = torch.arange(count, device=x.device) % 3 == 0
    weighted = [
        line[ours] * torch.arange(line[ours].numel(), device=x.device).cos().view_as(line[ours]) for line in lines
    ]
    (found,) = torch.autograd.grad([item.sum() for item in weighted if item.requires_grad], [x])
    of_tokens = found.reshape(count, -1)
    if bool(of_tokens[~ours].ne(0).any()) or not bool(of_tokens[ours].ne(0).any(1).all()):
        raise _Refuted


def _check_parameters(lines: Sequence[Tensor], learned: Sequence[Tensor]) -> None:
    """Check that all trained parameters take part in the results of one token."""
    of_token = [line.sum() for line in lines if line.requires_grad]
    found = torch.autograd.grad(of_token, learned, allow_unused=True) if learned else ()
    if any(item is None for item in found):
        raise _Refuted


def _check_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that results are equal but for the order of sums."""
    for x, y in zip(got, expected, strict=True):
        eps = torch.finfo(x.dtype).eps
        units = _EXACT if eps <= torch.finfo(torch.float32).eps else _ROUNDED
        if x.shape != y.shape or not bool((x - y).abs().max() <= units * eps * y.abs().max()):
            raise _Refuted


@contextlib.contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Check that a block draws no random numbers and leaves a module as it was; restore buffers."""
    buffers = [(x, x.detach().clone()) for x in module.buffers()]
    attributes = _attributes(module)
    devices = [] if device.type != "cuda" else [torch.cuda.current_device() if device.index is None else device.index]
    try:
        with torch.random.fork_rng(devices):
            before = _random_states(devices)
            yield
            drawn = any(not torch.equal(x, y) for x, y in zip(before, _random_states(devices), strict=True))
    finally:
        changed = [(x, old) for x, old in buffers if not torch.equal(x, old)]
        with torch.no_grad():
            for x, old in changed:
                x.copy_(old)
    if drawn or changed or attributes != _attributes(module):
        raise _Refuted


def _random_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _attributes(module: nn.Module) -> list[dict[str, tuple[int, int]]]:
    """Identify the attributes of all modules, and how many items containers among them have."""
    return [
        {
            name: (id(value), len(value) if isinstance(value, Collection) else 0)
            for name, value in vars(item).items()
            if name not in _TABLES
        }
        for item in module.modules()
    ]
