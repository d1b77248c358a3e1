"""Catalogue models converted by ``treefx.convert``, with layers that keep values.

A text reads the names that the texts of ``calls`` read. The model as written is the truth.
"""

from __future__ import annotations

from itertools import product

from treefx.tools.fuzz.families.parts import Part

__all__ = ["CONVERTED"]

_LLAMA = '''
def llama(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, use_cache=False)
    lm = LlamaForCausalLM(config)
    for layer in lm.model.layers:  # those of transformers compute in float32
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(16), nn.RMSNorm(16)
    lm.model.norm = nn.RMSNorm(16)
    return lm.to(dtype)


CAUGHT, STORED = [], {}


class KeepsNumber(nn.Linear):
    def forward(self, x):
        self.scale = self.weight.detach().abs().amax()
        return F.linear(x, self.weight, self.bias)


class KeepsTokens(nn.Linear):
    def forward(self, x):
        self.kept = F.linear(x, self.weight, self.bias)
        return self.kept

    def read(self): return [self.kept]


class AppendsTokens(nn.Linear):
    def forward(self, x):
        self.list = [F.linear(x, self.weight, self.bias)]
        return self.list[0]

    def read(self): return self.list


class AppendsOutside(nn.Linear):
    def forward(self, x):
        CAUGHT.append(F.linear(x, self.weight, self.bias))
        return CAUGHT[-1]


class StoresOutside(nn.Linear):
    def forward(self, x):
        STORED["y"] = F.linear(x, self.weight, self.bias)
        return STORED["y"]

    def read(self): return [STORED["y"]]


class CountsTokens(nn.Linear):
    def forward(self, x):
        with torch.no_grad(): self.seen.add_((x > 0).to(x.dtype).sum())
        return F.linear(x, self.weight, self.bias)


class Hooked(nn.Linear):
    """A plain layer whose output a hook keeps."""


def labels_of(b, given, padding):
    """Labels of the ids given; those that a dropped position predicts are ignored: its hidden state is zero."""
    if given["input_ids"].shape != b["ids"].shape: return given["input_ids"]
    dropped = b["am"] == 0 if padding == "drop" else b["am"].cumsum(1) == 0
    return b["labels"].masked_fill(F.pad(dropped, (1, -1)), -100)


def converted(seen, k, b, kind, given, options, convert, dtype):
    lm = llama(dtype)
    layer = lm.model.layers[1].mlp.down_proj
    layer.__class__ = kind
    layer.register_buffer("seen", torch.zeros((), dtype=dtype))
    if kind is Hooked: layer.register_forward_hook(lambda module, args, out: CAUGHT.append(out))
    lm.config.use_cache = given.pop("cache", False)
    if convert: treefx.convert(lm, min_sharing=1.0, **options)
    labels = labels_of(b, given, options.get("padding"))
    for turn in range(2):
        lm.zero_grad()
        CAUGHT.clear()
        try: logits = lm(**given).logits
        except IndexError: seen[f"{k}.{turn} raised"] = torch.ones(())
        else:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
            kept = layer.read() if hasattr(layer, "read") else CAUGHT
            loss = loss + 1e3 * sum(x.square().mean() for x in kept)  # their weights are small
            loss.backward()
            collect(seen, f"{k}.{turn}", loss, lm, {})
'''
_POSITIONS = "(b['am'].cumsum(1) - 1).clamp(min=0)"
_ROW = "'input_ids': b['ids'].reshape(1, -1), 'position_ids': torch.arange(b['ids'].numel())[None] % b['ids'].shape[1]"
_GIVEN = {
    "a mask": "'input_ids': b['ids'], 'attention_mask': b['am']",
    "no mask": "'input_ids': b['ids']",
    "positions": f"'input_ids': b['ids'], 'attention_mask': b['am'], 'position_ids': {_POSITIONS}",
    "ids out of range in padding": "'input_ids': b['ids'].masked_fill(b['am'] == 0, V), 'attention_mask': b['am']",
    "one row": _ROW,
    "one row and a cache": f"{_ROW}, 'cache': True",
}
_LAYERS = ("nn.Linear", "KeepsNumber", "KeepsTokens", "AppendsTokens", "AppendsOutside", "StoresOutside",
           "CountsTokens", "Hooked")  # fmt: skip
_OPTIONS = {"": "", ", head packed": "'pack_lm_head': True", ", padding dropped": "'padding': 'drop'"}

CONVERTED = {
    f"converted, {layer}, {name}{more}": Part(
        f"b = batches[{{b}}]\nconverted(seen, '{{k}}', b, {layer}, {{{given}}}, {{{options}}}, f is not m, dtype)\n",
        top=_LLAMA,
    )
    for layer, (name, given), (more, options) in product(_LAYERS, _GIVEN.items(), _OPTIONS.items())
}
"""Values kept in attributes, outside of the model and by hooks, buffers that count, and inputs of all kinds."""
