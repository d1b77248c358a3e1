"""The native level: the caller has a tree, the model sees one packed row, the loss is one term per edge.

    python examples/native_forest.py

Nothing is padded and nothing is expanded to rows; value and gradients are those of training on every row
separately.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treefx

torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        use_cache=False,
    )
)
compiled = torch.compile(model, backend="treefx")

# A prompt, two tool answers, two completions of each; the weight of a row is its reward.
prompt, tools = torch.randint(512, (100,)), torch.randint(512, (2, 40))
rollouts = [torch.cat([prompt, tools[i // 2], torch.randint(512, (20 + 5 * i,))]) for i in range(4)]
forest = treefx.Forest.from_sequences(rollouts, weights=[1.0, 0.0, 0.5, 1.0])
print(forest)

with treefx.use(forest):
    logits = compiled(**forest.model_inputs(), use_cache=False).logits
logprobs = treefx.edge_logprobs(logits, forest)
loss = treefx.losses.sft(logprobs, forest, reduction="token_mean")
loss.backward()
print(f"loss {loss.item():.4f}, {len(logprobs)} edges for {forest.raw_tokens} raw tokens")
