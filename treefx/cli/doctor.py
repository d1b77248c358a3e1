"""Check the installation and the backend's results: ``treefx doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treefx.config import Config
from treefx.errors import InputError
from treefx.output import console, make_table, print_json, print_line, waiting

if TYPE_CHECKING:
    import torch

__all__ = ["doctor", "self_check"]

_LIBRARIES = ("treefx", "torch", "triton", "numpy", "networkx", "sympy", "transformers", "tokenizers")
_TOLERANCE = 1e-10
_COLUMNS = ("symbol", "versions", "why", "test")


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
    seconds: Annotated[
        float, typer.Option(help="With --zoo --workers: seconds after which a model is given up.")
    ] = 3600.0,
    out: Annotated[
        Path | None, typer.Option(help="With --zoo: a JSON file of finished models, written after each.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --zoo --out: go on; what was wrong or crashed is checked again.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --zoo: print the table as Markdown.")] = False,
    patches: Annotated[
        bool, typer.Option("--patches", help="Print what treefx replaces in PyTorch and transformers, and why.")
    ] = False,
    code: Annotated[str, typer.Option(help="Print the entry of a code of a message, such as TFX104.")] = "",
) -> None:
    """Check the installation: versions, devices, the entry point, and a small model against eager execution.

    The self-check compiles a model of one attention layer and compares the loss and all gradients with
    eager float64. The exit status is 1 when something is wrong.

    With --zoo, every causal architecture of transformers and models of other libraries, tiny and random, run two
    batches of rows that share prefixes, of different shapes, padded right and left, in float32, against
    eager; with --batches, more. A line says how far loss and gradients are off at most, the tokens that
    ran of those in all batches, of the worst one the share of the floating-point operations in attention,
    projections, MLPs, experts and heads that ran once per distinct token, what was expanded to rows and
    why, and how often the model was compiled.
    Where float32 results differ by more than 1e-5, as gradients do that are sums which all but cancel,
    both are compared with float64, and treefx may be 1.5 times as far off as eager; a model beyond that
    whose step in float64 is exact "rounds", and is not called wrong. The gradient of a parameter that is
    one number is judged against the sizes of what rows contribute to it. Models of a library that is not
    installed say so (pip install 'treefx[examples]' brings transformers; litgpt, torchtune and
    x-transformers are yours).
    """
    if code:
        from treefx.tools.troubleshooting import entry_of

        print_line(entry_of(code))
        return
    inner = inner or ("aot_eager" if zoo else "inductor")
    Config.from_options({"inner": inner})
    given = {"--model": model, "--workers": workers, "--out": out, "--resume": resume, "--markdown": markdown}
    if patches:
        if zoo or any(given.values()):
            raise InputError("--patches prints a table and checks nothing: leave out the other options but --json")
        _show_patches(json)
        return
    if zoo:
        _doctor_zoo(model or [], (out, inner, batches, resume), (workers, seconds), json, markdown)
        return
    if stray := [name for name, value in given.items() if value]:
        raise InputError(f"{', '.join(stray)} belongs to the model zoo: write treefx doctor --zoo")
    with waiting("loading PyTorch", quiet=json) as progress:
        findings = _findings()
        progress.tell(f"checking a small model, compiled with {inner}")
        problems = _problems(findings, inner)
    if json:
        print_json(findings | {"problems": problems}, "treefx.doctor/1")
    else:
        rows = [(name, _show(value)) for name, value in findings.items()]
        console.print(make_table("treefx doctor", ("what", "found"), rows))
        for problem in problems:
            print_line(f"problem: {problem}", style="red")
        if not problems:
            print_line("all is well", style="green")
    if problems:
        raise typer.Exit(1)


def _show_patches(json: bool) -> None:
    with waiting("loading PyTorch", quiet=json):
        from treefx.torch_patches.table import PATCHES
    if json:
        patches = [{name: getattr(patch, name) for name in _COLUMNS} for patch in PATCHES]
        print_json(patches, "treefx.doctor.patches/1")
        return
    print_line(f"{len(PATCHES)} symbols that treefx replaces, for what it compiles alone; without that:")
    for patch in PATCHES:
        print_line(f"\n{patch.symbol} ({patch.versions})\n    {patch.why}")


def self_check(inner: str = "inductor") -> float:
    """Return the largest relative error of treefx against eager for a tiny float64 model.

    Loss and gradients are compared.

    Args:
        inner: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
    """
    from treefx.tools.bench.job import self_check

    return self_check.self_check(inner)


def _problems(findings: dict[str, Any], inner: str) -> list[str]:
    """Run the self-check where it can run; its error becomes a finding."""
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
    return problems


def _doctor_zoo(
    names: list[str], where: tuple[Path | None, str, int, bool], how: tuple[int, float], json: bool, markdown: bool
) -> None:
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench.zoo.record import ZooRecord
        from treefx.tools.bench.zoo.run import choose, run_zoo
        from treefx.tools.bench.zoo.table import show_zoo

        wanted = [model.name for model in choose(names)]
    out, inner, batches, resume = where
    record = ZooRecord(out, inner, batches, resume=resume)
    remaining = record.remaining(wanted)
    with waiting("checking models", total=len(wanted), quiet=json) as progress:
        progress.advance(len(wanted) - len(remaining))
        settings: dict[str, Any] = {
            "workers": how[0], "seconds": how[1], "inner": inner, "batches": batches, "on_start": progress.tell,
        }  # fmt: skip
        for row in run_zoo(remaining, **settings) if remaining else ():
            record.add(row)
            progress.advance()
    rows = record.of(wanted)
    show_zoo(rows, record.conditions, json=json, markdown=markdown)
    if any(row.verdict in ("wrong", "crashed") for row in rows):
        raise typer.Exit(1)


def _findings() -> dict[str, Any]:
    import torch

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
    """Name a device and the kernels of its attention; equal devices are listed once."""
    from treefx.kernels.gpu.triton_tree import support

    refusal = support.device_refusal(device)
    form = "in Gluon where it can" if support.architecture_name(device) == "9.0" else "in the plain form"
    way = f"generated kernels, {form}" if refusal is None else f"FlexAttention, as a generated kernel {refusal}"
    return f"{support.device_name(device)}, {support.architecture_name(device)}: {way}"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1e}" if isinstance(value, float) else str(value)
