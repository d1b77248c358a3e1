"""Threads: compiling, running and training at once, on models of their own and on one of all."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.backend.support import compile_with
from tests.batches import shared_batch
from tests.spellings import SPELLINGS
from treefx.passes.trace import trace

PATIENCE = 120.0
"""Seconds after which threads that wait for each other are found out."""


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return Small(SPELLINGS["sdpa_is_causal"]).double()


def batch_of(seed: int) -> dict[str, Tensor]:
    return shared_batch(rows=4, length=12, shared=5, vocab=61, padding=None, seed=seed).inputs()


def gradients(run: Any, model: nn.Module, seed: int) -> list[Tensor]:
    out = run(**batch_of(seed))
    loss = out.loss + out.logits.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def together(*acts: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """Results of acts in separate threads, all started at once."""
    results: dict[int, Any] = {}
    start = threading.Barrier(len(acts))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = acts[i]()
        except BaseException as error:  # noqa: BLE001
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[i] for i in range(len(acts))]


def assert_same(got: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for left, right in zip(got, wanted, strict=True):
        for x, y in zip(left, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("inner", "count"), [("aot_eager", 2), ("eager", 3)])
def test_models_that_compile_at_once(inner: str, count: int) -> None:
    models = [tiny() for _ in range(count)]
    compiled = [compile_with(model, inner=inner) for model in models]
    acts = [lambda i=i: gradients(compiled[i], models[i], i) for i in range(count)]
    reference = tiny()
    assert_same(together(*acts), [gradients(reference, reference, i) for i in range(count)])


def test_one_model_in_many_threads() -> None:
    """As ``nn.DataParallel`` and servers of reward models call it: cold, then warm."""
    model, reference = tiny(), tiny()
    compiled = compile_with(model, inner="aot_eager")
    wanted = [gradients(reference, reference, i) for i in range(3)]
    for _ in range(2):
        assert_same(together(*(lambda i=i: gradients(compiled, model, i) for i in range(3))), wanted)


def test_eager_models_run_on_while_another_compiles() -> None:
    """Tracing lasts for many steps of an eager model; none of them may see anything of it."""
    model, other, reference = tiny(), tiny(), tiny()
    compiled, done = compile_with(model, inner="aot_eager"), threading.Event()

    def compiling() -> list[Tensor]:
        try:
            return gradients(compiled, model, 0)
        finally:
            done.set()

    def running() -> list[Tensor]:
        wanted = gradients(reference, reference, 1)
        while not done.is_set():
            assert_same([gradients(other, other, 1)], [wanted])
        return wanted

    assert_same(together(compiling, running), [gradients(reference, reference, i) for i in range(2)])


def test_warm_models_run_on_while_another_compiles() -> None:
    model, warm, reference = tiny(), tiny(), tiny()
    run = compile_with(warm, inner="aot_eager")
    wanted = gradients(run, warm, 1)
    compiled, done = compile_with(copy.deepcopy(model), inner="aot_eager"), threading.Event()

    def compiling() -> list[Tensor]:
        try:
            return [compiled(**batch_of(0)).loss.detach()]
        finally:
            done.set()

    def running() -> list[Tensor]:
        while not done.is_set():
            assert_same([gradients(run, warm, 1)], [wanted])
        return wanted

    assert_same(together(compiling, running), [[reference(**batch_of(0)).loss.detach()], wanted])


def test_a_warm_model_runs_in_the_middle_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes a call of compiled code in another thread for a part of that trace, unless a compiler runs."""
    warm, reference = tiny(), tiny()
    run = compile_with(warm, inner="aot_eager")
    wanted, found = gradients(run, warm, 1), list[Any]()
    original = trace._ForwardTracer.run

    def with_another(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(together(lambda: gradients(run, warm, 1)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(trace._ForwardTracer, "run", with_another)
    model = Small(SPELLINGS["sdpa_is_causal"], after=nn.Tanh()).double()
    compile_with(model, inner="aot_eager")(**batch_of(0)).loss.backward()
    assert found
    for other in found:
        assert_same(other, [wanted])
    assert_same([wanted], [gradients(reference, reference, 1)])
