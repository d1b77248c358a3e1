"""Unread lazy outputs, given to everything that takes a tensor: they compute themselves or refuse."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import dlpack

from tests.backend.support import compile_with, llama
from tests.batches import shared_batch
from tests.oracle import refused
from treefx.runtime.lazy import Deferred, LazyRows, lazy_rows

VALUE = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) + 1


def unread() -> Tensor:
    """An output as treefx hands it back, made of ``VALUE``."""
    return lazy_rows(Deferred(VALUE.shape, VALUE, VALUE.clone, lambda grad: (), ()))


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def through(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The tensor after it was changed in place."""

    def run(x: Tensor) -> Tensor:
        change(x)
        return x * 1

    return run


def replace_data(x: Tensor) -> None:
    x.data = 3 * VALUE


READERS: dict[str, Callable[[Tensor], Any]] = {
    "dlpack": torch.from_dlpack,
    "dlpack of NumPy": lambda x: torch.from_numpy(np.from_dlpack(x)),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "copied array": lambda x: torch.from_numpy(np.array(x, copy=True)),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: x[1, 2, 3].item(),
    "storage": lambda x: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape).clone(),
    "typed storage": lambda x: list(x.storage()),
    "set from it": lambda x: torch.empty(0, dtype=x.dtype).set_(x) * 1,
    "address": lambda x: x.data_ptr() != 0,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "copy": lambda x: copy.copy(x) * 1,
    "deepcopy": copy.deepcopy,
    "shared memory": lambda x: x.share_memory_().is_shared(),
    "data": lambda x: x.data * 1,
    "foreach": lambda x: torch._foreach_add([x, x], 1)[1],
    "equal": lambda x: torch.equal(x, VALUE),
    "stack": lambda x: torch.stack([x, x]),
    "mul_": through(lambda x: x.mul_(2)),
    "mul_ of an alias": through(lambda x: x.detach().mul_(2)),
    "mul_ of data": through(lambda x: x.data.mul_(2)),
    "mul_ of a view": through(lambda x: x.view(-1)[3:].mul_(2)),
    "setitem": through(lambda x: x.__setitem__((0, 1), 0.0)),
    "out": through(lambda x: torch.add(VALUE, 1, out=x)),
    "other data": through(replace_data),
    "compiled": lambda x: torch.compile(lambda y: 2 * y + 1, backend="eager")(x),
    "gradient": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
}


@pytest.mark.parametrize("name", READERS)
def test_reads_like_a_plain_tensor(name: str) -> None:
    got, wanted = READERS[name](unread()), READERS[name](VALUE.clone())
    if isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("act", [lambda x: x.resize_(2), lambda x: x.set_(torch.zeros(2, dtype=x.dtype))])
def test_other_memory_is_refused(act: Callable[[Tensor], Any]) -> None:
    with refused("clone", "lazy_outputs"):
        act(unread())


def test_data_of_another_shape_is_refused() -> None:
    x = unread()
    with refused("[2, 3, 4]", "[2]"):
        x.data = torch.zeros(2)


def test_code_below_python_gets_an_error_for_an_address() -> None:
    """An extension in C++ sees the tensor without its Python methods: no zero to follow."""
    for read in (dlpack.to_dlpack, Tensor.data_ptr):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            read(unread())


def test_what_requires_grad_does_not_leave() -> None:
    """As any tensor in an autograd graph, it has to be detached first."""
    x = lazy_rows(Deferred(VALUE.shape, VALUE, VALUE.clone, lambda grad: (), [torch.ones(1, requires_grad=True)]))
    for leave in (torch.from_dlpack, lambda x: x.numpy()):
        with pytest.raises((RuntimeError, BufferError), match="require"):
            leave(x)


def test_logits_of_a_model() -> None:
    model, batch = llama(), shared_batch(rows=4, length=14, shared=6, padding=None)
    logits = compile_with(model)(**batch.inputs()).logits
    assert isinstance(logits, LazyRows)
    torch.testing.assert_close(torch.from_dlpack(logits.detach()), model(**batch.inputs()).logits.detach())


def by_hand(parameter: Tensor) -> None:
    parameter.data -= 0.1 * parameter.grad


def through_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[...] *= 2


@pytest.mark.parametrize("write", [by_hand, through_numpy])
def test_logits_after_a_step_that_counts_no_version_are_refused(write: Callable[[Tensor], None]) -> None:
    """Padding is computed when it is read, with the weights of the call or not at all."""
    model, batch = llama(), shared_batch(rows=4, length=14, shared=6)
    out = compile_with(model)(**batch.inputs())
    out.loss.backward()
    for parameter in model.parameters():
        write(parameter)
    with refused("weight", "has changed", "lazy_outputs"):
        out.logits * 1


def test_logits_after_no_step_are_read() -> None:
    """Weights that are not numbers have not changed either."""
    model, batch = llama(), shared_batch(rows=4, length=14, shared=6)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    out = compile_with(model)(**batch.inputs())
    out.loss.backward()
    assert out.logits[0, 0].isnan().all()
