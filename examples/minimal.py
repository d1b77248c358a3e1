"""The whole use of treefx in a training script: one argument of ``model.compile``.

    python examples/minimal.py

Eight answers to one prompt are trained as an ordinary padded batch. Model, batch and loss know nothing of
treefx, and the script need not import it: torch finds the backend by its name.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
)
model.compile(backend="treefx")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

prompt = torch.randint(512, (1, 192)).expand(8, -1)
answers = torch.randint(512, (8, 64))
input_ids = torch.cat([prompt, answers], dim=1)
labels = input_ids.clone()
labels[:, :192] = -100

for step in range(5):
    loss = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}")
