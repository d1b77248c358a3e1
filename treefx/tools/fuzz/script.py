"""Write a program as a script that imports torch and treefx, and prints both results.

``play`` in it runs all calls on a model compiled by its argument and returns the compared values, so the search and a
reader of the script run the same lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from treefx.tools.fuzz.families.around import COUNTERS, CUTS
from treefx.tools.fuzz.families.attention import attention_part
from treefx.tools.fuzz.families.autograd import AUTOGRAD
from treefx.tools.fuzz.families.calls import HELPERS, NATIVE
from treefx.tools.fuzz.families.embeddings import CONDITIONING, EMBEDDINGS, POSITIONS
from treefx.tools.fuzz.families.inputs import INPUTS
from treefx.tools.fuzz.families.layers import EXPERTS, MIXERS, NORMS, NUMBERED, POINTWISE, ROWS
from treefx.tools.fuzz.families.losses import HEADS, LABELS, LOSSES, OUTPUTS
from treefx.tools.fuzz.families.parts import Part
from treefx.tools.fuzz.families.situations import SITUATIONS, is_forest
from treefx.tools.fuzz.program import Attention, Batch, Program

__all__ = ["LAYERS", "inputs_of", "is_native", "is_random", "options_of", "parts_of", "script"]

LAYERS = {**MIXERS, **ROWS, **EXPERTS, **NORMS, **POINTWISE, **NUMBERED, **AUTOGRAD, **COUNTERS, **CUTS}
STARTS = {**EMBEDDINGS, **POSITIONS, **CONDITIONING}
_CHECKPOINTS = {"checkpoint": "False", "reentrant checkpoint": "True"}


def parts_of(program: Program) -> list[Part]:
    """All parts of the model in order: embeddings, layers, head, loss."""
    return [
        *[STARTS[name] for name in program.embeddings],
        *_layers(program),
        HEADS[program.head],
        LOSSES[program.loss],
    ]


def _layers(program: Program) -> list[Part]:
    return [
        attention_part(layer, program.sizes) if isinstance(layer, Attention) else LAYERS[layer.name]
        for layer in program.layers
    ]


def is_random(program: Program) -> bool:
    """Whether the model draws random numbers."""
    return any(part.is_random for part in parts_of(program))


def inputs_of(program: Program) -> list[str]:
    """List the inputs besides ids, am and labels, in the order of the catalogue."""
    wanted = {name for part in parts_of(program) for name in part.inputs.split()}
    return [name for name in INPUTS if name in wanted or (name == "positions" and is_native(program))]


def is_native(program: Program) -> bool:
    """Whether the program runs forests."""
    return any(is_forest(call.name) for call in program.calls)


def options_of(program: Program) -> str:
    """The arguments of torch.compile after the model."""
    options = "" if "default sharing" in program.modes else ', "min_sharing": 1.0'
    dynamic = ", dynamic=True" if "dynamic" in program.modes else ""
    return f'backend="treefx", options={{"inner": "{program.inner}"{options}}}{dynamic}'


def script(program: Program, says: str = "") -> str:
    """The whole text; ``says`` is the first line of its docstring."""
    blocks = [
        f'"""{says or "A program of treefx fuzz"}\n\nFamily {program.family}, seed {program.seed}.\n"""\n' + _IMPORTS,
        _sizes(program),
        *_tops(program),
        _model(program),
        _BUILD,
        _make(program),
        _criterion(program),
        HELPERS,
        *([NATIVE] if is_native(program) else []),
        _play(program),
        _MAIN.format(options=options_of(program)),
    ]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


_IMPORTS = """
import copy
import functools
import io
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import treefx
"""

_BUILD = """
def build(seed, dtype):
    torch.manual_seed(seed)
    return Model().to(dtype)
"""

_MAIN = """
def main():
    torch.set_num_threads(1)
    want = play(lambda m: m)
    try:
        got = play(lambda m: torch.compile(m, {options}))
    except Exception as error:
        return print("eager runs, treefx:", type(error).__name__, error)
    size = {{name: float(value.double().abs().max()) for name, value in want.items()}}
    least = 1e-4 * max((size[name] for name in size if "gradient" in name), default=1e-8)
    for name, value in want.items():
        other = got.get(name, torch.full_like(value, float("nan"))).double()
        error = float((other - value).abs().max()) / max(size[name], least)
        print(name, "want", value.double().sum().item(), "got", other.sum().item(), "relative error", f"{{error:.1e}}")


if __name__ == "__main__":
    main()
"""


def _sizes(program: Program) -> str:
    sizes = program.sizes
    return f"D, H, G, V = {sizes.width}, {sizes.heads}, {sizes.key_heads}, {sizes.vocabulary}"


def _tops(program: Program) -> list[str]:
    calls = [SITUATIONS[call.name].top for call in program.calls]
    return list(dict.fromkeys(top for top in [*[part.top for part in parts_of(program)], *calls] if top))


def _model(program: Program) -> str:
    starts = [STARTS[name] for name in program.embeddings]
    bodies = [(part, str(number)) for number, part in enumerate(_layers(program))]
    init = [part.init for part in starts] + [part.init.replace("{n}", number) for part, number in bodies]
    init += [HEADS[program.head].init, LOSSES[program.loss].init if _loss_inside(program) else ""]
    forward = ["B, T = ids.shape", "i, aux = torch.arange(T), 0.0", *[part.forward for part in starts]]
    for part, number in bodies:
        text = part.forward.replace("{n}", number)
        forward.append(_checkpointed(text, number, program.modes))
    forward += [HEADS[program.head].forward, *_ending(program)]
    extra = "".join(f", {name}=None" for name in inputs_of(program))
    return (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + _indented(init)
        + f"\n    def forward(self, ids, am, labels{extra}):\n"
        + _indented(forward)
    )


def _indented(lines: Iterable[str], depth: int = 2) -> str:
    return "".join(textwrap.indent(line.rstrip("\n"), "    " * depth) + "\n" for line in lines if line)


def _checkpointed(text: str, number: str, modes: tuple[str, ...]) -> str:
    reentrant = next((_CHECKPOINTS[mode] for mode in modes if mode in _CHECKPOINTS), None)
    if reentrant is None or "aux" in text:
        return text
    body = textwrap.indent(text, "    ")
    return f"def layer{number}(x):\n{body}\n    return x\nx = checkpoint(layer{number}, x, use_reentrant={reentrant})"


def _loss_inside(program: Program) -> bool:
    return program.output != "logits"


def _ending(program: Program) -> list[str]:
    if not _loss_inside(program):
        return [f"return {OUTPUTS[program.output]}"]
    return [LOSSES[program.loss].forward, f"return {OUTPUTS[program.output]}"]


def _make(program: Program) -> str:
    lines = [
        "ids, am, g = torch.tensor(ids), torch.tensor(am), torch.Generator().manual_seed(seed)",
        "B, T = ids.shape",
        f"b = dict(ids=ids, am=am, labels={LABELS[program.labels]})",
    ]
    for place, name in enumerate(INPUTS):
        if name in inputs_of(program):
            ways = INPUTS[name][:1] if is_native(program) else INPUTS[name]  # a forest counts positions from 0
            lines.append(f"b['{name}'] = {ways[(program.inputs + place) % len(ways)]}")
    lines.append("for n, x in b.items():")
    lines.append("    own = x.detach().to(dtype) if x.is_floating_point() else x.clone()")
    lines.append("    b[n] = own.requires_grad_(x.requires_grad)")
    lines.append("return b")
    return "def make(ids, am, seed, dtype):\n" + _indented(lines, 1)


def _criterion(program: Program) -> str:
    if _loss_inside(program):
        return "def criterion(out, b):\n    return out[0]\n"
    wanted = ["ids", "am", "labels", *inputs_of(program)]
    given = [f"{name} = b['{name}']" for name in wanted if name in LOSSES[program.loss].forward]
    lines = ["logits, ids, x = out[0], b['ids'], out[0]", *given, "B, T = ids.shape", "i = torch.arange(T)"]
    return "def criterion(out, b):\n" + _indented([*lines, LOSSES[program.loss].forward, "return loss"], 1)


def _batch(batch: Batch) -> str:
    return (
        f"make({[list(row) for row in batch.ids]},\n         {[list(row) for row in batch.mask]}, {batch.seed}, dtype),"
    )


def _play(program: Program) -> str:
    head = ["seen = {}", "batches = [", *[textwrap.indent(_batch(batch), "    ") for batch in program.batches], "]"]
    head += ["m = build(0, dtype)", "f = compile(m)", "opt = torch.optim.SGD(m.parameters(), 0.1)"]
    calls = [
        f"# {number}: {call.name}\n"
        + SITUATIONS[call.name].forward.replace("{k}", str(number)).replace("{b}", str(call.batch))
        for number, call in enumerate(program.calls)
    ]
    if "autocast" in program.modes:
        low = 'with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):\n'
        calls = [low + textwrap.indent(call, "    ") for call in calls]
    if "eval" in program.modes:
        head.append("m.eval()")
    return "def play(compile, dtype=torch.float64):\n" + _indented([*head, *calls, "return seen"], 1)
