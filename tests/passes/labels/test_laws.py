"""Every law: a program of its operators gives on distinct tokens what it gives on rows, and keeps its labels.

``golden.txt`` holds the labels of each program's values, and the packed graph that the passes write from it.
``TREEFX_ACCEPT=1 pytest tests/passes/labels`` writes the file again.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.backend.small import Small
from tests.backend.support import Pair, assert_packed
from tests.batches import distinct_tokens, shared_batch
from tests.oracle import compare
from tests.passes.labels.programs import PROGRAMS, Program
from tests.spellings import SPELLINGS
from treefx.passes.analysis import Analysis, Rewritten
from treefx.passes.labels.facts import fact_of
from treefx.passes.labels.laws.base import _FAMILIES, _LAWS, find_law
from treefx.passes.labels.laws.pointwise import pointwise
from treefx.runtime import analyses, shapes

GOLDEN = Path(__file__).parent / "golden.txt"
TORCH = "2.13"
"""The version whose operators ``golden.txt`` has."""
SIZES = ((3, 7), (4, 9))
BATCHES = [shared_batch(rows=b, length=t, shared=3, vocab=61, padding=None) for b, t in SIZES]
ELSEWHERE = {
    "attention_laws.attention": "tests/backend/models/test_spellings.py",
    "attention_laws.close_attention": "tests/backend/models/test_spellings.py",
    "attention_laws.segments": "tests/backend/calls/test_packed_rows.py",
    "choices.choose": "tests/backend/models/test_choices.py",
    "experts.floor_divide": "tests/backend/models/test_experts.py",
    "experts.histogram": "tests/backend/models/test_experts.py",
    "experts.index_put": "tests/backend/models/test_experts.py",
    "library_laws.library": "tests/backend/models/test_libraries.py",
    "library_laws.row_convolution": "tests/backend/models/test_libraries.py",
    "library_laws.row_scan": "tests/backend/models/test_libraries.py",
    "lookups.renormalised_table": "tests/backend/test_expansion.py",
    "movement.repeat_interleave": "tests/backend/test_expansion.py",
    "placed.masked_scatter": "tests/backend/models/test_images.py",
    "over_ranks.gather_pieces": "tests/scale/test_tensor_parallel_compiled.py",
    "over_ranks.own_piece": "tests/scale/test_tensor_parallel_compiled.py",
    "token_modules.token_module": "tests/backend/general/test_token_modules.py",
}
"""Laws of operators that need more than features of one token, and what tests them."""
NAMES, STACK = list(PROGRAMS), 12
"""Programs in one model: each has its own labels and weight, and one compilation does for all."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Analysis], list[Rewritten]]]:
    """The analyses and the graphs that are made."""
    found: tuple[list[Analysis], list[Rewritten]] = ([], [])
    analyse, rewrite = analyses.analyse, shapes.rewrite

    def analysed(*args: Any, **kwargs: Any) -> Analysis:
        found[0].append(analyse(*args, **kwargs))
        return found[0][-1]

    def rewritten(*args: Any) -> Rewritten:
        found[1].append(rewrite(*args))
        return found[1][-1]

    monkeypatch.setattr(analyses, "analyse", analysed)
    monkeypatch.setattr(shapes, "rewrite", rewritten)
    yield found


class Programs(torch.nn.Module):
    """The sum of several programs of the same tokens."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.programs = torch.nn.ModuleList(map(Program, names))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([program(x) for program in self.programs]).sum(0)


@pytest.mark.parametrize("names", [NAMES[i : i + STACK] for i in range(0, len(NAMES), STACK)], ids=", ".join)
def test_programs_run_on_distinct_tokens(names: list[str], made: tuple[list[Analysis], list[Rewritten]]) -> None:
    pair = Pair(Small(SPELLINGS["sdpa_is_causal"], before=Programs(names)).double())
    for batch in BATCHES:
        checked = pair.check(batch)
        assert_packed(checked, distinct_tokens(batch))
        assert checked.stats["expansions"] == []
    analysed, rewritten = made
    for number, name in enumerate(names):
        text = f"{labels_of(analysed[0].gm, number)}\n--\n{operators_of(rewritten[0].gm, number)}\n"
        if os.environ.get("TREEFX_ACCEPT"):
            write(name, text)
        elif torch.__version__.startswith(TORCH):
            assert text == read()[name]


def test_every_law_has_a_program() -> None:
    """By the operators in the golden labels; those of no program are named with their test."""
    named = {line.partition(":")[0] for text in read().values() for line in text.partition("\n--\n")[0].splitlines()}
    registered = {*_LAWS.values(), *(found for _, found in _FAMILIES)}
    targets = {str(target).removeprefix("aten."): target for target, _ in _LAWS}
    seen = {find_law(targets[name]) for name in named if name in targets}
    families = {law for holds, law in _FAMILIES if any(holds(operator(name)) for name in named)}
    missing = {f"{law.__module__.rpartition('.')[2]}.{law.__name__}" for law in registered - seen - families}
    assert missing == set(ELSEWHERE)
    assert all(Path(file).is_file() for file in ELSEWHERE.values())


def labels_of(gm: fx.GraphModule, number: int) -> str:
    """The operators of one program, and the labels of their results."""
    lines = []
    for node in of_program(gm, number):
        fact = fact_of(node)
        dims = "" if fact.dims is None else ", ".join("*".join(map(str, dim)) or "1" for dim in fact.dims)
        lines.append(f"{name_of(node)}: {fact.kind.value} [{dims}]")
    return "\n".join(lines)


def operators_of(gm: fx.GraphModule, number: int) -> str:
    """The operators that stand for one program, and the sizes of their results; N is the number of tokens."""
    lines = []
    for node in of_program(gm, number):
        lines.append(f"{name_of(node)}: " + re.sub(r"\b[su]\d+\b", "N", sizes_of(node.meta.get("val"))))
    return "\n".join(lines)


def sizes_of(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(sizes_of, value))
    return str(list(value.shape)) if isinstance(value, Tensor) else str(value)


def of_program(gm: fx.GraphModule, number: int) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        modules = node.meta.get("nn_module_stack", {}).values()
        if node.op == "call_function" and any(path.endswith(f".programs.{number}") for path, _ in modules):
            yield node


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    return str(target).removeprefix("aten.") if isinstance(target, torch._ops.OpOverload) else target.__name__


def operator(name: str) -> Any:
    """The operator of ATen with a name such as ``mul.Tensor``; the name where there is none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", name)


def read() -> dict[str, str]:
    parts = re.split(r"^== (.*)\n", GOLDEN.read_text(), flags=re.M) if GOLDEN.exists() else [""]
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def write(name: str, text: str) -> None:
    known = read() | {name: text}
    GOLDEN.write_text("".join(f"== {name}\n{known[name]}" for name in PROGRAMS if name in known))


# Along rows -----------------------------------------------------------------------------------------------------------

ALONG_ROWS = {
    "a running sum": (torch.ops.aten.cumsum.default, lambda x: x.cumsum(1)),
    "the other way round": (torch.ops.aten.flip.default, lambda x: x.flip(1)),
    "a softmax over rows": (torch.ops.aten._softmax.default, lambda x: x.softmax(1)),
    "an order": (torch.ops.aten.sort.stable, lambda x: x.sort(stable=True, dim=1)[0]),
    "the token before": (torch.ops.aten.roll.default, lambda x: x.roll(1, 1)),
    "a Fourier transform over rows": (torch.ops.aten._fft_c2c.default, lambda x: torch.fft.fft2(x, dim=(1, 2)).real),
    "rows in another order": (torch.ops.aten.roll.default, lambda x: x.roll(1, 0)),
}
"""The operator, and a program that no law may take for one of single tokens."""


class AlongRows(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([ALONG_ROWS[name][1](x) for name in self.names]).sum(0)


def along_rows(*names: str) -> Small:
    return Small(SPELLINGS["sdpa_is_causal"], after=AlongRows(*names)).double()


def test_what_reads_other_tokens_is_exact() -> None:
    pair = Pair(along_rows(*ALONG_ROWS))
    for batch in BATCHES:
        assert pair.check(batch).stats["expansions"]


@pytest.mark.parametrize("name", ALONG_ROWS)
def test_with_a_law_of_single_tokens_it_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, program = ALONG_ROWS[name]
    ran = [str(node.target) for node in make_fx(program)(torch.zeros(2, 3, 4)).graph.nodes]
    assert str(target) in ran, ran
    monkeypatch.setitem(_LAWS, (target, None), pointwise)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(along_rows(name), BATCHES[0], inner="eager")
