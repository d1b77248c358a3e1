"""Equal layers that were compiled once are loaded by the next process, not compiled again."""

import json
import subprocess
import sys
from pathlib import Path

from tests.backend.support import empty_cache

PROGRAM = """
import json, torch, treefx
from torch import nn
from torch._dynamo.utils import counters

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x).unsqueeze(1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], -1)  # slices: the backward fills with zeros of N tokens
        return x + nn.functional.scaled_dot_product_attention(turned, q, q, is_causal=True)[:, 0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 8), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="treefx", options={"min_sharing": 1.0, "regions": True})
ids = torch.randint(0, 50, (6, 16))
ids[:, :9] = ids[0, :9]
gradients = []
for run in (compiled, model):
    model.zero_grad()
    run(ids).backward()
    gradients.append([p.grad for p in model.parameters()])
for got, expected in zip(*gradients):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
stats = treefx.inspect(compiled).stats
hits = {name: count for group in counters.values() for name, count in group.items() if "cache" in name}
print(json.dumps({"ran": stats["ran"], "passes": list(stats["seconds"]), "hits": hits}))
"""


def test_a_second_process_loads_layers(tmp_path: Path) -> None:
    environment = empty_cache(tmp_path)
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert "unable to load" not in done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert cold["ran"] == warm["ran"] == "packed" and "regions" in cold["passes"]
    assert cold["hits"].get("autograd_cache_hit", 0) == 0
    assert warm["hits"].get("autograd_cache_hit", 0) == 1 and not warm["hits"].get("fxgraph_cache_miss")
