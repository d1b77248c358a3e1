"""``treefx doctor``: what is installed, and whether the backend computes rightly here."""

import importlib.metadata
import os
import platform
import shutil
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

from treefx.cli.output import console, make_table, print_json, print_line

__all__ = ["doctor", "self_check"]

_LIBRARIES = ("treefx", "torch", "triton", "numpy", "networkx", "sympy", "transformers", "tokenizers")
_TOLERANCE = 1e-10


def doctor(
    inner: Annotated[str, typer.Option(help="Inner compiler of the self-check.")] = "inductor",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check the installation: versions, devices, the entry point, and a small model against eager execution.

    The self-check compiles a model of one attention layer and compares the loss and all gradients with
    eager float64. The exit status is 1 when something is wrong.
    """
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


def _findings() -> dict[str, Any]:
    findings: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for library in _LIBRARIES:
        try:
            findings[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            findings[library] = None
    findings["CPU threads"] = torch.get_num_threads()
    findings["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
    findings["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    findings["C++ compiler"] = next((path for name in compilers if name and (path := shutil.which(name))), None)
    findings["backend registered"] = "treefx" in torch._dynamo.list_backends()
    return findings


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
