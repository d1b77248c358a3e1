"""One process and its surroundings: threads, pickles, modes, limits, resets, dumps, logs, caches of compiled code."""

import copy
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import metrics_context
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.utils import counters
from torch.nn import functional as F

import treefx
from tests.backend.small import Small
from tests.backend.support import assert_packed, empty_cache, fresh_cache
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.oracle import FLOAT64, assert_close, compare, compile_with, eager_step, loss_of, outcome, refused, stats_of
from tests.spellings import SPELLINGS
from treefx.passes.packing.compile_inner import Inner, _CacheKey
from treefx.passes.pipeline import build_passes
from treefx.passes.trace.fingerprint import fingerprint
from treefx.runtime import dynamo
from treefx.runtime.records import Records
from treefx.runtime.ways.ordinary import Ordinary
from treefx.torch_patches.dynamo import log_without_settings, pass_warnings

BATCH = shared_batch(rows=4, length=12, shared=5, vocab=61, padding=None)


def tiny() -> nn.Module:
    return Small(SPELLINGS["sdpa_is_causal"]).double()


def in_thread(work: Callable[[], None]) -> None:
    """Runs to the end in another thread; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


# Threads --------------------------------------------------------------------------------------------------------------


def test_backward_in_another_thread() -> None:
    model = tiny()
    expected = eager_step(model, BATCH)
    compiled = compile_with(model)
    loss = loss_of(BATCH)(compiled)
    in_thread(loss.backward)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-10, atol=1e-14)


def test_lazy_logits_read_in_another_thread() -> None:
    """Their second run reports to the model they came from, not to the one that ran last in that thread."""
    model, other = tiny(), tiny()
    compiled, second = (compile_with(each, inner="eager") for each in (model, other))
    out = compiled(**BATCH.inputs())
    fewer = Batch(BATCH.input_ids[:1], None, BATCH.labels[:1])
    loss_of(fewer)(second)
    in_thread(lambda: out.logits.square().sum().backward())
    assert model.embed.weight.grad is not None and other.embed.weight.grad is None
    assert stats_of(compiled)["tokens"] == distinct_tokens(BATCH)
    assert stats_of(second)["tokens"] == distinct_tokens(fewer)


# Pickles --------------------------------------------------------------------------------------------------------------


def test_weights_and_models_are_saved_as_if_not_compiled(tmp_path: Path) -> None:
    model = tiny()
    keys = list(model.state_dict())
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    loss = loss_of(BATCH)(model)
    assert stats_of(model)["ran"] == "packed"
    assert list(model.state_dict()) == keys
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    restored = torch.load(tmp_path / "model.pt", weights_only=False)
    fresh = tiny()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    for twin in (restored, fresh, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(loss_of(BATCH)(twin), loss, rtol=1e-10, atol=0)


# Modes, options, limits -----------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """Of what one causal attention makes of embeddings: compiled in the shortest time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()


@pytest.mark.parametrize(("mode", "shared"), [("reduce-overhead", 8), ("max-autotune", 0)])
def test_modes_of_inductor(mode: str, shared: int) -> None:
    """They decide how the rewritten graph is compiled, and the ordinary one where nothing is shared."""
    seen = []

    def record(graph: torch.fx.Graph) -> None:
        config = torch._inductor.config
        seen.append({"triton.cudagraphs": config.triton.cudagraphs, "max_autotune": config.max_autotune})

    model, ids = Mean(), torch.arange(24).view(2, 12)
    ids[:, :shared] = 0
    compiled = torch.compile(model, backend="treefx", mode=mode)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=record), torch.no_grad():
        torch.testing.assert_close(compiled(ids) * 1, model(ids))
    assert stats_of(compiled)["ran"] == ("packed" if shared else "ordinary")
    wanted = {"triton.cudagraphs": True, "max_autotune": mode == "max-autotune"}
    assert seen and all(settings == wanted for settings in seen), seen


def test_what_is_looked_up_and_padded_compiles() -> None:
    """A check of indices under a condition that all lanes share, which inductor of PyTorch 2.11 writes as no C++."""
    dynamo.keep_graphs_whole()
    factors, table, ids = torch.randn(8, 32), torch.randn(8, 10), torch.randint(0, 10, (32,))

    def padded(factors: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return F.pad(factors * table[:, ids], (0, 0, 0, 8))

    compiled = torch.compile(padded, backend="inductor")
    assert torch.equal(compiled(factors, table, ids), padded(factors, table, ids))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        compiled(factors, table, ids.clone().fill_(10))


def test_modes_are_of_inductor() -> None:
    compiled = torch.compile(tiny(), backend="treefx", options={"inner": "eager", "mode": "max-autotune"})
    with refused("max-autotune", "inner"):
        loss_of(BATCH)(compiled)


def test_recompile_limit_of_dynamo() -> None:
    """Beyond it Dynamo runs the model uncompiled: no prefix is shared, and the step is exact."""
    model = tiny()
    options = {"inner": "eager", "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (8, 9, 10):
            batch = shared_batch(rows=3, length=length, shared=4, vocab=61, padding=None)
            expected = eager_step(model, batch)
            assert_close(outcome(model, lambda batch=batch: loss_of(batch)(compiled)), expected, FLOAT64)
    assert stats_of(compiled)["calls"] == 2


def test_reset_forgets_what_was_compiled() -> None:
    compiled = compile_with(tiny(), inner="eager")
    for _ in range(2):
        loss_of(BATCH)(compiled)
        (report,) = treefx.inspect(compiled).reports
        assert report.compiles == 1, "of the graph that ran last"
        torch.compiler.reset()


# Passes ---------------------------------------------------------------------------------------------------------------


def test_dumps_of_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(tmp_path))
    compare(tiny(), BATCH)
    names = [path.name for path in sorted((tmp_path / "passes").iterdir())]
    order = [name.split(".")[3] for name in names if name.endswith(".diff")]
    assert order == [item.name for item in build_passes(Inner("aot_eager"))]
    packed = next(path for path in (tmp_path / "passes").glob("*pack_tokens.diff"))
    assert "+" in packed.read_text() and "treefx.tree_attention" in packed.read_text()
    assert len(names) == 3 * len(order)


def test_loss_laws_left_out() -> None:
    checked = compare(tiny(), BATCH, disable_passes=["loss_laws"], inner="eager")
    assert_packed(checked, distinct_tokens(BATCH))
    assert [item["op"] for item in checked.stats["expansions"]]
    assert compare(tiny(), BATCH, inner="eager").stats["expansions"] == []


@pytest.mark.parametrize(
    "names, words", [(["trace"], "cannot be left out"), (["sink"], "loss_laws"), ("trace", "list")]
)
def test_passes_that_cannot_be_left_out(names: Any, words: str) -> None:
    with refused("disable_passes", words):
        treefx.Config(disable_passes=names)


# Logs of Dynamo -------------------------------------------------------------------------------------------------------


def test_the_log_of_a_compilation_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo reports what it could not write of its log instead of raising it."""
    reported: list[str] = []
    monkeypatch.setattr(metrics_context.log, "exception", reported.append)
    loss_of(BATCH)(compile_with(tiny(), inner="eager")).backward()
    assert not reported


def test_settings_that_cannot_be_written_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 writes the functions that Dynamo shall trace past as JSON."""

    def settings() -> str:
        return json.dumps(list(torch._dynamo.config.ignore_logging_functions))

    monkeypatch.setattr(dynamo_utils, "_get_dynamo_config_for_logging", settings)
    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        log_without_settings()
        assert dynamo_utils._get_dynamo_config_for_logging() == "[]"
        pass_warnings()
        log_without_settings()
        assert dynamo_utils._get_dynamo_config_for_logging() is None


# Caches ---------------------------------------------------------------------------------------------------------------


def traced(tag: bool = False, scale: float = 2.0) -> torch.fx.GraphModule:
    gm = torch.fx.symbolic_trace(lambda x: (x * scale).sin())
    for node in gm.graph.nodes:
        if tag and node.op != "placeholder":
            node.meta["recompute"] = 1
    return gm


def test_cache_key_sees_what_the_code_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint tags and treefx's own sources decide after the lookup; inductor's key has both."""
    from torch._inductor.codecache import compiled_fx_graph_hash

    def key(gm: torch.fx.GraphModule) -> str:
        with torch._inductor.config.patch(post_grad_custom_pre_pass=_CacheKey(gm)):
            return str(compiled_fx_graph_hash(gm, [torch.zeros(3)], {}, [])[0])

    assert key(traced()) == key(traced())
    assert key(traced(tag=True)) != key(traced())
    before = key(traced())
    monkeypatch.setattr("treefx.passes.packing.compile_inner.source_fingerprint", lambda: "another version")
    assert key(traced()) != before


def test_the_ordinary_graph_of_another_version_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold operators of treefx, whose schemas change."""

    def hits() -> int:
        counters.clear()
        torch._dynamo.reset()
        x = torch.full((3,), 0.5)
        gm = torch.fx.symbolic_trace(lambda x, n: (x * 2.0).sin() * n)
        torch.testing.assert_close(Ordinary(gm, Inner(), Records(gm))(x, 3), x.mul(2).sin() * 3)
        return int(counters["inductor"]["fxgraph_cache_hit"])

    with fresh_cache():
        assert hits() == 0
        assert hits() == 1
        monkeypatch.setattr("treefx.passes.packing.compile_inner.source_fingerprint", lambda: "another version")
        assert hits() == 0


def test_pass_of_the_user_stays_in_place() -> None:
    seen: list[torch.fx.Graph] = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=seen.append):
        marker = _CacheKey(traced())
    assert marker.uuid() is None, "a pass without a key forbids caching"
    marker(traced().graph)
    assert len(seen) == 1


def test_fingerprint_ignores_names_and_sees_the_rest() -> None:
    gm, renamed = traced(), traced()
    for node in renamed.graph.nodes:
        node.name = f"other_{node.name}"
    assert fingerprint(renamed) == fingerprint(gm)
    assert fingerprint(traced(scale=3.0)) != fingerprint(gm)
    assert fingerprint(traced(tag=True)) != fingerprint(gm)


PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.scale = torch.nn.Embedding(50, 16), torch.nn.Parameter(torch.ones(16))

    def forward(self, ids):
        x = (self.embed(ids) * self.scale).unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()

torch.manual_seed(0)
model = Model()
assert "treefx" not in sys.modules, "the backend is found by its name"
compiled = torch.compile(model, backend="treefx", options={"min_sharing": 1.0})
draws = torch.randint(0, 50, (80, 64))
found = []
for shared in (60, 64, 32, 0):  # of 64 columns in 80 rows: N = 384, 64, 2,592 and nearly 5,120
    ids = torch.where(torch.arange(64) < shared, draws[0], draws)
    ids[:, 0] = draws[0, 0] if shared else torch.arange(80) % 50
    losses, gradients = [], []
    for run in (compiled, model):
        model.zero_grad()
        losses.append(run(ids))
        losses[-1].backward()
        gradients.append((model.embed.weight.grad, model.scale.grad))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for got, expected in zip(*gradients):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    stats = sys.modules["treefx"].inspect(compiled).stats
    found.append([stats["tokens"], stats["compiles"], stats["ran"], float(losses[0].detach())])
hits = {name: count for group in counters.values() for name, count in group.items() if "cache" in name}
print(json.dumps({"found": found, "hits": hits}))
"""


def test_one_compilation_on_inductor_and_a_warm_second_process(tmp_path: Path) -> None:
    """Fresh and from inductor's cache: the same compiled code for few tokens and for more than 4096.

    Neither process imports treefx.

    Above 4096 inductor sums with a helper that rounds less. It takes the size it compiles for as a condition, so a
    graph compiled for 5,120 tokens used to be compiled again for fewer.
    """
    environment = empty_cache(tmp_path)
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert warm["found"] == cold["found"]
    tokens, compiles, ran, _ = zip(*cold["found"], strict=True)
    assert min(tokens) == 64 and max(tokens) > 4096
    assert set(compiles) == {1} and set(ran) == {"packed"}
    assert cold["hits"].get("autograd_cache_hit", 0) == 0
    assert warm["hits"].get("autograd_cache_hit", 0) >= 1 and not warm["hits"].get("fxgraph_cache_miss")
