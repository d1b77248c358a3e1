"""One long sequence trained under a memory limit that holds an eighth of its activations.

The sequence is cut into parts that run one after the other; keys and values cross the cuts forward, their gradients
backward. The peak is measured with an allocation tracker and drawn next to the limit; with `--check` the uncut sequence
runs as well, and loss and gradients are compared.

    python examples/long_sequence.py --tokens 65536 --check
"""

import argparse
import copy
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import treefx
from treefx.planning.cost.memory import Peak, install_allocator, track_peak

MIB = 2**20


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=1 << 17,
    )  # fmt: skip
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def train_uncut(model: torch.nn.Module, forest: treefx.Forest, inner: str) -> torch.Tensor:
    compiled = torch.compile(model, backend="treefx", options={"inner": inner})
    with treefx.use(forest):
        out = compiled(**forest.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, forest), forest, reduction="token_mean")
    loss.backward()
    return loss.detach()


def token_mean(logp: torch.Tensor, forest: treefx.Forest) -> torch.Tensor:
    return treefx.losses.sft(logp, forest, reduction="token_mean")


def draw_curve(peak: Peak, limit: float, path: str) -> None:
    seconds, held = zip(*peak.curve, strict=True)
    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    axes.plot(seconds, [value / MIB for value in held], drawstyle="steps-post", linewidth=0.8, label="measured")
    axes.axhline(limit / MIB, color="tab:red", label="limit")
    axes.set(xlabel="seconds", ylabel="MiB above the model", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
    print(f"memory over time: {path}")


def report_errors(got: torch.nn.Module, expected: torch.nn.Module) -> None:
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
    errors = []
    for name, parameter in got.named_parameters():
        truth = wanted[name]
        assert truth is not None and parameter.grad is not None
        errors.append(float((parameter.grad - truth).abs().max() / truth.abs().max()))
    print(f"largest relative difference of a gradient: {max(errors):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="length of the sequence")
    parser.add_argument("--held", type=int, default=8192, help="tokens whose activations the limit holds")
    parser.add_argument("--inner", default="inductor", help="what compiles the graphs: inductor or aot_eager")
    parser.add_argument("--check", action="store_true", help="run the uncut sequence too, and compare")
    parser.add_argument("--curve", default="long_sequence.png", help="image file of the memory curve")
    options = parser.parse_args()

    install_allocator()
    model = build_model()
    twin = copy.deepcopy(model)
    sequence = torch.randint(0, 256, (options.tokens,), generator=torch.Generator().manual_seed(0))
    forest = treefx.Forest.from_sequences([sequence])
    compiled = torch.compile(model, backend="treefx", options={"inner": options.inner})
    profile = treefx.profile(compiled, forest)
    cost = profile.cost.for_forest(forest)
    # Activations of so many tokens, below all others; and of all tokens K/V and their gradients.
    run = cost.backward(options.held, options.tokens - options.held, options.held)
    limit = cost.resident_bytes + run + cost.store_bytes_per_token * options.tokens
    plan = treefx.plan(forest, profile, memory_limit_bytes=int(limit))
    print(plan)
    print(plan.explain())
    started = time.perf_counter()
    with track_peak(curve=True) as peak:
        loss = treefx.backward(compiled, plan, token_mean, progress=True)
    print(f"{time.perf_counter() - started:.1f} s")
    allowed = limit - sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    print(
        f"loss {float(loss):.6f}, peak {peak.bytes / MIB:.1f} MiB of {allowed / MIB:.1f} allowed above the model, "
        f"{(plan.peak_bytes - limit + allowed) / MIB:.1f} predicted"
    )
    draw_curve(peak, allowed, options.curve)
    if options.check:
        with track_peak() as uncut:
            truth = train_uncut(twin, forest, options.inner)
        print(f"uncut: loss {float(truth):.6f}, peak {uncut.bytes / MIB:.1f} MiB")
        report_errors(model, twin)


if __name__ == "__main__":
    main()
