"""Programs: drawn from a seed, written as a script, read back, made smaller."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import treefx
from treefx.tools.fuzz.describe import describe
from treefx.tools.fuzz.families.batches import PADDINGS, draw_batch
from treefx.tools.fuzz.grammar import FAMILIES, choose_families, generate
from treefx.tools.fuzz.program import Attention, Batch, Call, Piece, Program, Sizes, from_dict, to_dict
from treefx.tools.fuzz.script import is_random, script
from treefx.tools.fuzz.shrink import shrink, smaller
from treefx.tools.fuzz.truth import judge

PLAIN = Program(
    seed=0,
    family="losses",
    inner="eager",
    sizes=Sizes(4, 1, 1),
    embeddings=("embedding",),
    layers=(Attention(("causal", "padding")),),
    head="linear",
    loss="cross entropy",
    output="loss",
    labels="padding ignored",
    inputs=0,
    modes=(),
    batches=(Batch(((3, 4, 5, 6), (3, 4, 9, 0)), ((1, 1, 1, 1), (1, 1, 1, 0))),),
    calls=(Call("train"),),
)
"""A program that packs whole."""


def test_a_seed_and_a_number_always_draw_the_same_program() -> None:
    assert [generate(3, number) for number in range(40)] == [generate(3, number) for number in range(40)]
    assert [generate(3, number) for number in range(40)] != [generate(4, number) for number in range(40)]


def test_a_program_survives_being_written_down() -> None:
    for number in range(60):
        program = generate(0, number)
        assert from_dict(json.loads(json.dumps(to_dict(program)))) == program


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_every_family_run_eagerly(family: str) -> None:
    runs = [_runs_eagerly(generate(2, number, [family])) for number in range(12)]
    assert sum(runs) >= 10


def _runs_eagerly(program: Program) -> bool:
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(script(program), "<program>", "exec"), space)
    try:
        return bool(space["play"](lambda model: model))
    except Exception:
        return False


def test_a_script_runs_alone_and_prints_what_it_wants_and_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(script(PLAIN, "Shown"))
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("0 loss want ") and " got " in line for line in lines)
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-10 for line in lines)


def test_random_programs_never_meet_a_compiler_that_draws_otherwise() -> None:
    drawn = [generate(5, number, ["random"], "inductor") for number in range(30)]
    assert all(program.inner != "inductor" for program in drawn if is_random(program))
    assert any(is_random(program) for program in drawn)


@pytest.mark.parametrize("padding", PADDINGS)
def test_batches_share_prefixes_under_every_padding(padding: str) -> None:
    batch = draw_batch(Random(1), 5, 9, 24, padding)
    assert {len(row) for row in (*batch.ids, *batch.mask)} == {9}
    rows = [
        tuple(token for token, kept in zip(*pair, strict=True) if kept)
        for pair in zip(batch.ids, batch.mask, strict=True)
    ]
    forest = treefx.Forest.from_sequences([row for row in rows if row])
    assert forest.num_tokens < forest.raw_tokens


def test_families_are_chosen_by_name() -> None:
    assert choose_families([]) == tuple(FAMILIES)
    assert choose_families(["masks", "masks", "losses"]) == ("masks", "losses")
    with pytest.raises(treefx.TreefxError, match="has the families .*masks.*; got mask"):
        choose_families(["mask"])


def test_shrinking_keeps_what_fails_and_nothing_else() -> None:
    large = replace(
        PLAIN,
        embeddings=("embedding", "columns", "token types"),
        layers=(
            Attention(("causal", "padding", "window"), ("rotary",), "matmul", "additive", "-1e9"),
            Piece("dropout"),
        ),
        head="capped",
        loss="z-loss",
        modes=("checkpoint",),
        calls=(Call("no_grad"), Call("train and step"), Call("train")),
    )

    def fails(program: Program) -> bool:
        return any("window" in getattr(layer, "conditions", ()) for layer in program.layers)

    small = shrink(large, fails, tries=200)
    assert small.layers == (Attention(("window",)),)
    assert (small.embeddings, small.modes, small.head, small.loss) == (("embedding",), (), "linear", "cross entropy")
    assert len(small.calls) == 1
    assert (len(small.batches[0].ids), len(small.batches[0].ids[0])) == (1, 2)
    assert "attention (window)" in describe(small)


def test_nothing_is_tried_that_is_not_smaller() -> None:
    assert PLAIN not in list(smaller(PLAIN))


def test_a_plain_program_is_exact() -> None:
    found = judge(PLAIN)
    assert (found.kind, found.stats["tokens"], found.stats["raw_tokens"]) == ("exact", 5, 7)
    assert found.error <= 1e-10
