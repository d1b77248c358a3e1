"""Recurrences and convolutions of one forest on several ranks: losses and gradients of separate rows."""

import datetime
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import treefx
from tests.backend.models.test_libraries import DELTA
from tests.backend.models.test_libraries import MODELS as SIZES
from tests.backend.native import TakesCacheFlag, random_weights, rollouts
from tests.libraries import CALLS, double_with_libraries
from tests.models import TinyLM, double
from tests.oracle import FLOAT64, Outcome, assert_close, relative_errors, separate_rows
from tests.planning.test_execute_states import Recurrence
from tests.scale.ranks import run_ranks
from tests.scale.test_context import gradients
from tests.spellings import SPELLINGS
from treefx.passes.cuts import exchange_heads
from treefx.passes.cuts.exchange_heads import share_of
from treefx.passes.cuts.exchange_scans import HeadExchange
from treefx.passes.trace import library_tree
from treefx.scale.context import make_context_row
from treefx.scale.pieces import TokenSplit

SECONDS = 400
STEM = [5, 6, 7, 8, 9, 10]
FOREST = [[*STEM, 11, 12, 13], [*STEM, 14, 15], [*STEM[:3], 16, 17], [20, 21, 22, 23]]
"""17 tokens: a chain of three, a fork, a chain of three, a fork, then another root."""
CUTS: dict[str, tuple[list[list[int]], list[int]]] = {
    "a chain": ([list(range(3, 30))], [10, 20]),
    "in a chain": (FOREST, [5, 8]),
    "at forks": (FOREST, [6, 11]),
    "uneven": (FOREST, [1, 4]),
    "a rank of one token": (FOREST, [16, 17]),
    "a rank of no token": ([[5, 6, 7], [5, 6, 8]], [4, 4]),
    "a single token": ([[5]], [1, 1]),
    "another forest": (rollouts(7), [13, 31]),
}
"""Rows, and where rank 1 begins and ends in the packed order."""


def shared_keys() -> nn.Module:
    """A state space of four heads that read the same keys."""
    torch.manual_seed(0)
    return TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=0, before=Recurrence(False))).double()


def mamba2() -> nn.Module:
    return double_with_libraries("mamba2", num_hidden_layers=1, **SIZES["mamba2"])


def qwen3_next() -> nn.Module:
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    return double("qwen3_next", num_hidden_layers=2, **layers, **DELTA)


def lfm2() -> nn.Module:
    return double("lfm2", num_hidden_layers=1, layer_types=["conv"])


MODELS: dict[str, tuple[Callable[[], nn.Module], str, list[str]]] = {
    "shared keys": (shared_keys, "aot_eager", list(CUTS)[:3]),
    "mamba2": (mamba2, "eager", ["in a chain", "uneven"]),
    "qwen3_next": (qwen3_next, "eager", list(CUTS)),
    "lfm2": (lfm2, "eager", ["in a chain", "at forks", "uneven"]),
}
"""How to build the model, what compiles it, and which cuts it runs: the deepest first."""

# On every rank --------------------------------------------------------------------------------------------------------


def split_at(forest: treefx.Forest, places: Sequence[int], ranks: int) -> TokenSplit:
    """Rank 1 has the tokens between two places, rank 0 the others; further ranks have none."""
    tokens = np.arange(forest.num_tokens)
    inside = (tokens >= places[0]) & (tokens < places[1])
    held = [tokens[~inside], tokens[inside], *[tokens[:0]] * (ranks - 2)]
    none = np.zeros(1, dtype=np.int64)
    return TokenSplit(tuple(own if len(own) else none for own in held), np.zeros(ranks), none, "by hand")


def one_step(model: nn.Module, name: str) -> dict[str, Any]:
    """Loss and gradients of all ranks together."""
    rows, places = CUTS[name]
    forest, group = treefx.Forest.from_sequences(rows, weights=random_weights(rows)), dist.group.WORLD
    assert group is not None
    own = make_context_row(forest, split_at(forest, places, group.size()), group.rank(), group.group_name)
    model.zero_grad()
    with treefx.use(own):
        out = model(**own.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "gradients": gradients(model)}


def train(name: str) -> list[dict[str, Any]]:
    """Every cut with one model, which compiles once; then plausible mistakes."""
    build, inner, cuts = MODELS[name]
    model = compiled(build(), inner)
    library_tree._KEPT_WHOLE.add("cpu")
    setattr(library_tree, "levels_cost_less", lambda *_, **__: True)  # small forests would run by tree_scan
    found = [one_step(model, cut) for cut in cuts]
    stats = treefx.inspect(model).stats
    found[-1]["stats"], found[-1]["calls"] = (stats["ran"], stats["fallback"], stats["compiles"]), dict(CALLS)
    if name == "shared keys":
        with replaced(exchange_heads, "_summed", last_rank_alone):
            found.append(one_step(model, cuts[1]))
        torch._dynamo.reset()
        with replaced(HeadExchange, "extend", lambda *_: None):
            found.append(one_step(compiled(build(), "eager"), cuts[1]))
    return found


def compiled(model: nn.Module, inner: str) -> nn.Module:
    model.compile(backend="treefx", options={"inner": inner})
    return model


def last_rank_alone(parts: Sequence[Tensor], share: Any) -> Tensor:
    """Gradients of keys that several ranks read come from the last of these."""
    kept = [rank for rank, start in enumerate(share.starts) if start not in share.starts[rank + 1 :]]
    return summed([x if rank in kept else torch.zeros_like(x) for rank, x in enumerate(parts)], share)


summed = exchange_heads._summed


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def worker(rank: int, port: int, folder: str, world: str, name: str) -> None:
    """One of the processes; writes what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=int(world), timeout=limit)
    torch.save(train(name), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


# Against one process --------------------------------------------------------------------------------------------------


def expected(model: nn.Module, cut: str) -> Outcome:
    rows, _ = CUTS[cut]
    return separate_rows(model, rows, random_weights(rows))


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "calls"), [("qwen3_next", set()), ("mamba2", {"mamba_chunk_scan_combined"}), ("lfm2", set())]
)
def test_two_ranks_match_separate_rows(name: str, calls: set[str], tmp_path: Path) -> None:
    """Also by a library's kernel (Mamba 2), with its parameters per head."""
    results = run_ranks(__name__, tmp_path, "2", name, seconds=SECONDS)
    check(results, name)
    assert all(set(result[-1]["calls"]) == calls for result in results)


def test_three_ranks_share_four_heads(tmp_path: Path) -> None:
    """One rank has neither heads nor tokens. Then what fails: gradients of one rank alone, and scans of own tokens."""
    results = run_ranks(__name__, tmp_path, "3", "shared keys", seconds=SECONDS, world=3)
    *right, of_one, local = zip(*results, strict=True)
    check(list(zip(*right, strict=True)), "shared keys")
    want = expected(MODELS["shared keys"][0](), MODELS["shared keys"][2][1])
    for found, is_right in ((of_one, True), (local, False)):
        errors = relative_errors(Outcome(found[0]["loss"], found[0]["gradients"]), want)
        assert (errors["loss"] < FLOAT64) == is_right
        assert max(errors.values()) > 0.01


def check(results: Sequence[Sequence[dict[str, Any]]], name: str) -> None:
    """Loss and gradients of every cut, by one compilation."""
    build, _, cuts = MODELS[name]
    model = build()
    for number, cut in enumerate(cuts):
        want = expected(model, cut)
        for result in results:
            assert_close(Outcome(result[number]["loss"], result[number]["gradients"]), want, FLOAT64)
    assert all(result[len(cuts) - 1]["stats"] == ("packed", None, 1) for result in results)


def test_every_head_reads_its_group() -> None:
    for heads, ranks in itertools.product(range(1, 13), range(1, 6)):
        for groups in (number for number in range(1, heads + 1) if heads % number == 0):
            share, own = share_of(groups, heads, ranks), -(-heads // ranks)
            assert own % share.width == 0
            for rank, number in itertools.product(range(ranks), range(own)):
                head, place = rank * own + number, share.starts[rank] + number * share.width // own
                is_read = place < share.range_of(rank).stop
                assert is_read == (head < heads)
                assert not is_read or place // share.repeats == head * groups // heads
