"""What a process keeps from call to call: 300 steps of shapes that never repeat leave no store larger.

A store is found by where it may lie, not by a list: a container or a cached function among the globals of any module of
treefx, among the attributes of a class, or in any living object of such a class.
"""

import functools
import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

import treefx
from tests.backend.native import TakesCacheFlag, native_loss
from tests.models import TinyLM
from tests.planning.cuts import every_node
from tests.spellings import SPELLINGS
from treefx.inputs import token_count
from treefx.runtime import call_plan

STEPS, WARM_UP = 300, 150
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, WeakIdKeyDictionary)
_CONTAINERS = (dict, list, set, frozenset, deque, *_WEAK)


def _entries(x: Any) -> int:
    if isinstance(x, functools._lru_cache_wrapper):
        return x.cache_info().currsize
    return len(x) if isinstance(x, _CONTAINERS) else 0


def _places() -> Iterator[tuple[str, Any]]:
    """All that may be a store, and where it lies."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("treefx"):
            continue
        for name, value in list(vars(module).items()):
            yield f"{module_name}:{name}", value if name != "__builtins__" else None
            if isinstance(value, type) and value.__module__ == module_name:
                members = list(vars(value).items())
                yield from ((f"{module_name}:{name}.{own}", getattr(x, "__func__", x)) for own, x in members)
    ours: dict[int, bool] = {}  # by the class of an object: there are millions of objects, and few classes
    for item in gc.get_objects():
        owner = type(item)
        if id(owner) not in ours:
            ours[id(owner)] = str(owner.__module__).startswith("treefx")
        if ours[id(owner)]:
            yield f"objects of {owner.__qualname__}", [item]
            yield from ((f"{owner.__qualname__}.{name}", x) for name, x in list(getattr(item, "__dict__", {}).items()))


def sizes_of_stores() -> Counter[str]:
    """Entries of every store of the process, those of all objects of a class together."""
    gc.collect()
    sizes: Counter[str] = Counter()
    for place, value in _places():
        sizes[place] += _entries(value)
    return sizes


def growth(step: Callable[[int], None], steps: int = STEPS, warm_up: int = WARM_UP) -> dict[str, tuple[int, int]]:
    """The stores that grow between two counts, and both numbers."""
    for number in range(warm_up):
        step(number)
    before = sizes_of_stores()
    for number in range(warm_up, steps):
        step(number)
    after = sizes_of_stores()
    kept = {name: size for name, size in after.items() if size and not name.startswith("objects")}
    print(f"{len(kept)} stores, {sum(kept.values())} entries:", dict(Counter(kept).most_common(20)))
    return {name: (before[name], size) for name, size in after.items() if size > before[name]}


class Model(nn.Module):
    """Attention that is causal, or not; the latter is refused for every shape."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.project, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (x.unsqueeze(1) for x in self.project(self.embed(ids)).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).squeeze(1)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class WithoutTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(ids[..., None].expand(*ids.shape, 8).float()).square().mean()


def trained(model: nn.Module, **options: Any) -> Callable[[int], None]:
    """A training step on a batch of a shape like no other."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="treefx", dynamic=True, options={"inner": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        ids = torch.randint(0, 20, (3 + number % 5, 8 + number))
        ids[:, :5] = ids[0, :5]
        compiled(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ids_of(number: int) -> Tensor:
    """A batch of a shape like no other. The longest come first: a store may hold what the last batch needs."""
    ids = torch.randint(3, 20, (3 + number % 2, 8 + (STEPS - number) // 2))
    ids[:, :5] = ids[0, :5]
    return ids


def converted() -> Callable[[int], None]:
    """A training step of a converted model whose head runs on distinct tokens too."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    treefx.convert(model, min_sharing=1.0, pack_lm_head=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        ids = ids_of(number)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_forests(cut: bool) -> Callable[[int], None]:
    """A training step on a forest, whole or in parts."""
    torch._dynamo.reset()
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, positions=False))
    compiled: Any = torch.compile(model, backend="treefx", dynamic=True, options={"inner": "eager"})

    def step(number: int) -> None:
        forest = treefx.Forest.from_sequences(ids_of(number).tolist())
        if cut:
            treefx.backward(compiled, every_node(forest), treefx.losses.sft)
        else:
            native_loss(forest)(compiled).backward()
        model.zero_grad()

    return step


CASES: dict[str, Callable[[], Callable[[int], None]]] = {
    "packed": lambda: trained(Model(causal=True), min_sharing=1.0),
    "little shared": lambda: trained(Model(causal=True), min_sharing=50.0),
    "refused": lambda: trained(Model(causal=False)),
    "without tokens": lambda: trained(WithoutTokens()),
    "converted": converted,
    "forests": lambda: on_forests(cut=False),
    "parts": lambda: on_forests(cut=True),
}


@pytest.mark.parametrize("name", CASES)
def test_no_store_grows_with_the_shapes(name: str) -> None:
    assert growth(CASES[name]()) == {}


def test_a_store_without_a_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_count, "_REMEMBERED", 10**6)
    assert "FreeSizes._admitted" in growth(CASES["without tokens"](), 100, 50)


def test_a_store_that_is_new_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, int] = {}
    cached = functools.cache(lambda number: number)
    monkeypatch.setattr(call_plan, "_planted", kept, raising=False)
    monkeypatch.setattr(call_plan.Batch, "planted", staticmethod(cached), raising=False)

    def step(number: int) -> None:
        kept[number] = cached(number)

    found = growth(step, 10, 5)
    assert found["treefx.runtime.call_plan:_planted"] == found["treefx.runtime.call_plan:Batch.planted"] == (5, 10)


def test_refused_shapes_are_not_analysed_for_ever() -> None:
    model = Model(causal=False)
    step = trained(model)
    for number in range(40):
        step(number)
    (run,) = treefx.runtime.records.find(model.parameters())
    shapes = run.graph._analyses._shapes  # type: ignore[attr-defined]
    assert len(shapes._known) == run.graph.config.max_shapes
    assert "attention" in str(run.report.fallback)
    step(39)
    assert len(shapes._known) == run.graph.config.max_shapes + 1, "a shape that comes again is analysed"
