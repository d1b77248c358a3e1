"""``treefx doctor``: what is installed, and whether the backend computes rightly here."""

import importlib.metadata
import os
import platform
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch.nn import functional

from treefx.bench.zoo.record import ZooRecord
from treefx.bench.zoo.run import choose, run_zoo
from treefx.bench.zoo.table import show_zoo
from treefx.kernels.gpu.triton_tree import support
from treefx.output import console, make_table, notes, print_json, print_line

__all__ = ["doctor", "self_check"]

_LIBRARIES = ("treefx", "torch", "triton", "numpy", "networkx", "sympy", "transformers", "tokenizers")
_TOLERANCE = 1e-10


# Long: an option takes one line or three.
def doctor(
    inner: Annotated[
        str, typer.Option(help="Inner compiler. [default: inductor; for the zoo aot_eager]", show_default=False)
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    zoo: Annotated[bool, typer.Option("--zoo", help="Check the model zoo instead: several minutes.")] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="With --zoo: this model only, by its name in the table; may be repeated.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="With --zoo: batches of each model, no two of one shape.")] = 2,
    workers: Annotated[
        int, typer.Option(help="With --zoo: number of processes, which outlive a crash or a hang; 0: this one alone.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="With --zoo: a JSON file that holds what is done, written after every model.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --zoo --out: go on; what was wrong or crashed is checked again.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --zoo: print the table as Markdown.")] = False,
) -> None:
    """Check the installation: versions, devices, the entry point, and a small model against eager execution.

    The self-check compiles a model of one attention layer and compares the loss and all gradients with
    eager float64. The exit status is 1 when something is wrong.

    With --zoo, 64 architectures of transformers and models of other libraries, tiny and random, run two
    batches of rows that share prefixes, of different shapes, padded right and left, in float32, against
    eager; with --batches, more. A line says how far loss and gradients are off at most, the tokens that
    ran of those in all batches, of the worst one the share of the floating-point operations in attention,
    projections, MLPs, experts and heads that ran once per distinct token, what was expanded to rows and
    why, and how often the model was compiled.
    Where float32 results differ by more than 1e-5, as gradients do that are sums which all but cancel,
    both are compared with float64, and treefx may be 1.5 times as far off as eager; the gradient of a
    parameter that is one number is judged against the sizes of what rows contribute to it. Models of a
    library that is not installed say so (pip install 'treefx[examples]' brings transformers; litgpt,
    torchtune and x-transformers are yours).
    """
    if zoo:
        record = ZooRecord(out, inner or "aot_eager", batches, resume=resume)
        _doctor_zoo(model or [], record, workers, batches, json, markdown)
        return
    inner = inner or "inductor"
    findings = _findings()
    problems = []
    if not findings["backend registered"]:
        problems.append("torch does not find the backend 'treefx': reinstall the package, its entry point is missing")
    elif inner == "inductor" and findings["C++ compiler"] is None:
        problems.append(
            "inductor needs a C++ compiler on the CPU: install gcc or clang, or check with --inner aot_eager"
        )
    else:
        findings["self-check"] = self_check(inner)
        if not findings["self-check"] <= _TOLERANCE:
            problems.append(
                f"gradients of the self-check are off by {findings['self-check']:.1e}, allowed {_TOLERANCE}"
            )
    if json:
        print_json(findings | {"problems": problems})
    else:
        rows = [(name, _show(value)) for name, value in findings.items()]
        console.print(make_table("treefx doctor", ("what", "found"), rows))
        for problem in problems:
            print_line(f"problem: {problem}", style="red")
        if not problems:
            print_line("all is well", style="green")
    if problems:
        raise typer.Exit(1)


def _doctor_zoo(names: list[str], record: ZooRecord, workers: int, batches: int, json: bool, markdown: bool) -> None:
    wanted = [model.name for model in choose(names)]
    remaining, inner = record.remaining(wanted), record.conditions["inner"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task("zoo", total=len(wanted), completed=len(wanted) - len(remaining))
        on_start = partial(_begin, progress, task)
        settings: dict[str, Any] = {"workers": workers, "inner": inner, "batches": batches, "on_start": on_start}
        for row in run_zoo(remaining, **settings) if remaining else ():
            record.add(row)
            progress.advance(task)
    rows = record.of(wanted)
    show_zoo(rows, record.conditions, json=json, markdown=markdown)
    if any(row.verdict in ("wrong", "crashed") for row in rows):
        raise typer.Exit(1)


def _begin(progress: Progress, task: TaskID, name: str) -> None:
    progress.update(task, description=name)
    if not progress.console.is_terminal:
        notes.print(name)


def _findings() -> dict[str, Any]:
    findings: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for library in _LIBRARIES:
        try:
            findings[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            findings[library] = None
    findings["CPU threads"] = torch.get_num_threads()
    findings["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
    found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    findings["GPU"] = "; ".join(dict.fromkeys(_gpu(torch.device("cuda", number)) for number in found)) or None
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    findings["C++ compiler"] = next((path for name in compilers if name and (path := shutil.which(name))), None)
    findings["backend registered"] = "treefx" in torch._dynamo.list_backends()
    return findings


def _gpu(device: torch.device) -> str:
    """Return what a device is called, and what runs attention on it; of several like it this is said once."""
    capability = torch.cuda.get_device_capability(device)
    refusal = support.device_refusal(device)
    form = "in Gluon where it can" if capability == (9, 0) else "in the plain form"
    way = f"generated kernels, {form}" if refusal is None else f"FlexAttention, as a generated kernel {refusal}"
    return f"{support.device_name(device)}, {capability[0]}.{capability[1]}: {way}"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1e}" if isinstance(value, float) else str(value)


class _TinyModel(torch.nn.Module):
    """One causal attention layer with learned positions and a residual; knows nothing of treefx."""

    def __init__(self, vocab_size: int = 32, width: int = 16, heads: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = torch.nn.Embedding(vocab_size, width)
        self.places = torch.nn.Embedding(longest, width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of [B, T] ids; labels of -100 are ignored."""
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        shape = (*ids.shape, self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.mix(hidden).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.out(hidden + mixed.transpose(1, 2).reshape(hidden.shape))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def self_check(inner: str = "inductor") -> float:
    """Largest relative error of the loss or any gradient of a tiny float64 model, treefx against eager.

    Args:
        inner: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
    """
    torch.manual_seed(0)
    model = _TinyModel().double()
    ids = torch.randint(32, (4, 12))
    ids[:, :8] = ids[0, :8]
    expected = _loss_and_gradients(model, model, ids)
    options: dict[str, Any] = {"inner": inner, "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options)
    actual = _loss_and_gradients(model, compiled, ids)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in zip(actual, expected))


def _loss_and_gradients(model: torch.nn.Module, call: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    loss = call(ids, ids)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
