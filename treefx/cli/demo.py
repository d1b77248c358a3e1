"""``treefx demo``: a small run of the main job on the scripted sample."""

from typing import Annotated

import typer

from treefx.output import console, print_json, print_line, waiting

__all__ = ["demo"]


def demo(
    model: Annotated[str, typer.Option(help="An architecture of transformers: llama, qwen3, gemma2, ...")] = "llama",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    backend: Annotated[str, typer.Option(help="The torch.compile backend to show.")] = "treefx",
    baseline: Annotated[str, typer.Option(help="The torch.compile backend to compare with.")] = "inductor",
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Train a small model on rollouts of a scripted agent, with treefx and without.

    A shop's service desk is played by a script: every task several times, with tool calls, failures and
    branches. Each assistant turn is one training row, as agent frameworks emit them, so most tokens come
    many times. The same batches are trained with both backends from the same weights; what you see is how
    many tokens are distinct, how long a step takes, and that losses and gradients are equal. The two
    compilations take a minute or more.
    """
    with waiting("loading PyTorch", quiet=json) as progress:
        import treefx
        from treefx.data import scripted_conversations
        from treefx.tools.bench.job.models import make_config, make_model, require_backend
        from treefx.tools.bench.job.rollouts import make_tokenizer, prepare_batches, train_and_compare

        for name in (backend, baseline):
            require_backend(name)
        # The least vocabulary: an unknown architecture is refused before the tokenizer is trained.
        make_config(model, vocab_size=8, hidden_size=128, layers=2)
        progress.tell("making batches")
        conversations = scripted_conversations(tasks=4, trials=3)
        tokenizer = make_tokenizer(conversations, vocab_size=1024)
        prepared = prepare_batches(conversations, tokenizer, steps=steps, rows=rows, max_length=768, pad_multiple=768)
        config = make_config(model, vocab_size=tokenizer.vocab_size, hidden_size=128, layers=2)
        progress.tell(f"compiling with {baseline} and {backend}")
        report, run = train_and_compare(
            make_model(config), prepared.batches, backend=backend, baseline=baseline, on_progress=progress.tell
        )
    if json:
        print_json(report.to_dict(), "treefx.demo/1")
        return
    console.print(report.table())
    for line in report.lines():
        print_line(line)
    if backend == "treefx":
        print_line(treefx.inspect(run.compiled).summary())
