"""Kernels compiled for GPUs that are not there: a part of ``treefx bench kernel``, and the bounds themselves."""

import itertools
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.kernels.gpu.planting import planted, template
from tests.kernels.gpu.stages import compile_to
from treefx.cli.app import app
from treefx.errors import InputError
from treefx.kernels.gpu.triton_tree import device
from treefx.kernels.gpu.triton_tree.configs import SHARED_MEMORY, Problem, one_pass_fits, usable_shared_memory
from treefx.kernels.gpu.triton_tree.small_launches import ROW_VECTORS, launch_finish, launch_prologue
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.bench.attention.kernel import Case, problems, run
from treefx.tools.kernels.ahead_of_time import CompileReport, _specialised, compile_launch
from treefx.tools.kernels.instructions import instructions_of_loops
from treefx.tools.kernels.pipeline import copies_ahead

triton = pytest.importorskip("triton")

EVERYTHING = ("window", "softcap", "alibi", "sinks")
BF16 = torch.bfloat16
BACKWARD = ["backward_keys", "backward_queries", "backward_once"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))


def verdicts(arch: int, *cases: Case, paths: tuple[str, ...] = ("plain", "gluon")) -> dict[tuple[Any, ...], list[str]]:
    records = list(run(arch, paths=paths, cases=cases))
    assert_measured("kernel", records)
    return {(record["kernel"], record["path"], *record["features"]): record["problems"] for record in records}


def test_hopper_in_both_forms() -> None:
    found = verdicts(90, Case(BF16, 128, 128, 7, EVERYTHING))
    assert len(found) == 8, "kernels without products make the score's values of rows"
    assert not any(found.values()), found


def test_hopper_wide_and_uneven_heads() -> None:
    cases = Case(BF16, 192, 128, 4), Case(torch.float32, 80, 80)
    found = verdicts(90, *cases, paths=("plain",))
    assert not any(found.values()), found


def test_plain_loops_load_ahead() -> None:
    """Both loops of each kernel, and numbers of rows (log-sum-exp and delta, as one number) like queries and gradients.

    Not where the number of a tile is loaded in the turn that uses it, as it once was, nor rows found by it.
    """

    def ahead(*kernels: str) -> dict[str, tuple[int, ...] | None]:
        launches = bench_kernel._launches(Case(BF16, 64, 64, 4), "plain", 90)
        chosen = [launch for launch in launches if launch.kernel.__name__ in kernels]
        compiled = {launch.kernel.__name__: compile_to("ttgir", launch, 90) for launch in chosen}
        return {name: copies_ahead(stages.asm["ttgir"]) for name, stages in compiled.items()}

    found = ahead("forward", *BACKWARD)
    assert found.keys() == {"forward", *BACKWARD} and found["backward_keys"] == (3, 3)
    assert all(loops and len(loops) == 2 and min(loops) > 0 for loops in found.values())
    at_use = template("plain").replace("key = tile * BLOCK_N", "key = tl.load(tiles + entry) * BLOCK_N")
    with planted("plain", at_use.replace("block = tile\n", "block = tl.load(tiles + entry)\n")):
        assert {name: (loops or (1,))[0] for name, loops in ahead("forward", "backward_keys").items()} == {
            "forward": 0,
            "backward_keys": 0,
        }
    late = template("plain").replace("BLOCK_M)) + block * BLOCK_M", "BLOCK_M)) + tl.load(tiles + entry) * BLOCK_M")
    with planted("plain", late):
        assert max(ahead("backward_keys")["backward_keys"] or ()) < 3


@pytest.mark.parametrize("case", [Case(BF16, 128, 128, 4), Case(BF16, 96, 96, 7, ("boundary",))], ids=str)
def test_instructions_of_the_plain_form(case: Case) -> None:
    """Per logit, over full tiles and under the mask, of the forward and of both backwards.

    The forward untrimmed 13.1 and 24.4; over half as many keys 12.3 and 17.3. Triton 3.6 spilled over all keys of the
    wide tile while sizes of keys were loaded under a mask. While where rows lie was kept over the loops, keys from
    outside spilled 160 bytes in groups of 7, and 104 there.
    Two passes, with addresses of their own for rows that lie any number apart, and loads under a mask, 13.0 and 15.7 in
    dk and dv of 128 features, and 13.6 and 16.8 in Triton 3.6; there 16.5 under the mask in dq of keys from outside.
    Rows found from the tile's first took 12.3 over full tiles there, of 96 features.
    One pass takes fewer instructions than two: in all loops, and for five products instead of seven; 15.3 and 18.1, and
    15.9 and 20.1 in Triton 3.6, where dq changed hands before it was added, and the log-sum-exp and delta of a row were
    two numbers.
    """
    asked = ["forward", *(BACKWARD[:2] if case.features else BACKWARD)]
    records = list(itertools.islice(run(90, paths=("plain",), cases=[case]), len(asked)))
    for record in records:
        most = zip(record["instructions_per_logit"], (12.0, 16.0), strict=True)
        assert all(0 < found <= bound for found, bound in most), record
        assert record["spill_bytes"] <= (64 if record["kernel"] in BACKWARD else 0) and not record["problems"], record
    loops = {record["kernel"]: record["instructions_per_logit"] for record in records}
    assert [*loops] == asked
    once = loops.get("backward_once", (0.0, 1.0))
    assert once[0] < once[1] and max(once) < min(loops["backward_keys"]) + min(loops["backward_queries"])


def test_instructions_in_gluon() -> None:
    """Per logit, over full tiles and under the mask, of all kernels: of heads and groups that are no power of two."""
    for record in run(90, paths=("gluon",), cases=[Case(BF16, 96, 96, 7)]):
        found = record["instructions_per_logit"]
        assert max(found[::2], default=0) <= 9.5 and max(found[1::2], default=0) <= 13.0, record
        assert record["spill_bytes"] <= 64 and not record["problems"]


def by_hand(ptx: str, *operands: int) -> list[bool]:
    """Run the block that masks logits, and return which are seen; operands are those after the logits."""
    count = len(operands) // 3
    values: dict[str, int] = {f"${number}": value for number, value in enumerate(operands, 2 * count)}
    values |= {f"${number}": 1 for number in range(count, 2 * count)} | {"0fFF800000": 0}
    values |= {text: int(text, 0) for text in re.findall(r"\b(?:0x)?[0-9A-F]+(?=[,;])", ptx)}
    body = ptx.strip("{ }").split(";")[ptx.count(".reg") :]
    for name, rest in (line.split(None, 1) for line in map(str.strip, body) if line):
        result, *given = re.findall(r"[$\w]+", rest)
        x = [values[text] for text in given]
        ones = (1 << 32) - 1
        values[result] = {
            "shl": lambda: x[0] << min(x[1] & ones, 32) & ones,
            "not": lambda: x[0] ^ ones,
            "and": lambda: x[0] & x[1],
            "setp": lambda: x[0] != x[1],
            "selp": lambda: x[0] if x[2] else x[1],
        }[name.split(".")[0]]()
    return [bool(values[f"${number}"]) for number in range(count)]


def test_bits_of_a_tile_by_hand() -> None:
    """The assembler's text, which no interpreter of Triton's runs: equal to what the interpreter does in its place.

    Of each logit alone, whatever bounds the others have. It makes no difference whether bounds lie in the tile, or
    anywhere behind it; forgetting the bound behind does.
    """
    ptx = device.seen_bits(8)

    def wrong(text: str) -> int:
        bounds = 0, 1, 5, 16, 30, 31, 32, 33, 1 << 30
        cases = list(itertools.product(bounds, bounds, range(32)))
        random.Random(0).shuffle(cases)
        found = 0
        for number in range(0, len(cases), 8):
            first, after, place = zip(*cases[number : number + 8], strict=True)
            seen = by_hand(text, *first, *after, *(1 << one for one in place))
            found += sum(one != (x <= y < z) for one, x, y, z in zip(seen, first, place, after, strict=True))
        return found

    assert wrong(ptx) == 0
    assert wrong(ptx.replace("not.b32 after, after;", "")) > 0
    assert wrong(ptx.replace("bits, 0xFFFFFFFF, $16", "bits, 0xFFFFFFFF, $17")) > 0


def test_a_threads_logits_come_in_the_order_that_their_bits_have() -> None:
    """What Triton hands to the assembler's text: first those of one key, with the bits of its queries, then the other.

    All kernels of dk and dv have that text, so none of them would notice if the order were another.
    """
    launches = bench_kernel._launches(Case(BF16, 64, 64), "plain", 90)
    (launch,) = (one for one in launches if one.kernel.__name__ == "backward_keys")
    texts = re.findall(r"\{ \.reg \.pred seen.*?\}", compile_to("ptx", launch, 90).asm["ptx"], flags=re.DOTALL)
    (text,) = (one for one in texts if "and.b32 bits" in one)  # the other is of one pair, behind the loops
    firsts, ends = (re.findall(rf"shl\.b32 {name}, 0xFFFFFFFF, (\S+);", text) for name in ("bits", "after"))
    bounds = list(zip(firsts, ends, strict=True))
    bits = re.findall(r"and\.b32 bits, bits, ([^a]\S*);", text)
    assert len(bits) == len(bounds) == 32 and len({*bits[:16]}) == 16 and bits[:16] == bits[16:]
    assert len({*bounds[:16]}) == len({*bounds[16:]}) == 1 and bounds[0] != bounds[16]


@pytest.mark.parametrize("arch", [80, 90])
def test_what_becomes_of_sums(arch: int) -> None:
    sums, dq = torch.empty(2, 384, 80), torch.empty(1, 64, 10, 72, dtype=BF16).transpose(1, 2)
    report = compile_launch(launch_finish(sums, dq, 0.125, 2), arch)
    assert report.spill_bytes == 0 and report.registers <= 128


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"head_dim": 64, "value_dim": 64, "shared_limit": SHARED_MEMORY[86]}, True),
        ({"head_dim": 192}, False),
        ({"value_dim": 256}, False),
        ({"heavy": True}, False),
        ({"dtype": torch.float32}, False),
        ({"shared_limit": SHARED_MEMORY[80]}, False),
        ({"head_dim": 80, "value_dim": 80, "shared_limit": SHARED_MEMORY[80]}, True),
        ({"head_dim": 96, "value_dim": 96, "shared_limit": SHARED_MEMORY[80]}, False),
        ({"head_dim": 64, "value_dim": 64, "shared_limit": usable_shared_memory(100)}, True),
        ({"head_dim": 80, "value_dim": 80, "shared_limit": usable_shared_memory(100)}, False),
    ],
)
def test_where_one_pass_fits(change: dict[str, Any], fits: bool) -> None:
    """Not with scores and heads that spill, nor where only narrow tiles fit: they add more than they save."""
    assert one_pass_fits(replace(Problem("backward_once", "plain", BF16, 128, 128, 4), **change)) == fits


@pytest.mark.parametrize("arch", [80, 90])
def test_what_runs_before_the_backward(arch: int) -> None:
    """With queries and gradients copied in the order of rows, of a group that is no power of two."""
    q, out = (torch.empty(1, 64, 10, width, dtype=BF16).transpose(1, 2) for width in (80, 128))
    launch = launch_prologue(q, out, out, torch.empty(1, 10, 64), 2, read=ROW_VECTORS)
    assert launch.arguments["PackedQ"].shape == (1, 2, 320, 80)
    report = compile_launch(launch, arch)
    assert report.spill_bytes == 0 and report.registers <= 128


def test_loops_are_found_in_machine_code() -> None:
    """A loop with a product, one around it, one without, a jump back from out of line; fillers do not count."""
    text = """
    .L_x_0:
    /*0*/ MOV R1, R2 ;
    .L_x_1: \n /*1*/ @P0 HGMMA.64x64 R1 ; \n /*2*/ NOP ;
    .L_x_2: \n /*3*/ FADD R1, R2 ; \n /*4*/ @!P1 BRA `(.L_x_1) ;
    .L_x_3: \n /*5*/ FADD R1, R2 ; \n /*6*/ @P2 BRA `(.L_x_3) ; \n /*7*/ HGMMA.64x64 R1 ; \n /*8*/ BRA `(.L_x_0) ;
    /*9*/ SYNCS ; \n /*a*/ BRA `(.L_x_2) ;
    """
    assert instructions_of_loops(text.replace("\\n", "\n")) == (3,)


def test_blackwell() -> None:
    """In one pass, heads of 96 took 576 columns of 512: what the compiler then makes does nothing."""
    found = verdicts(100, Case(BF16, 96, 96, 4))
    assert {path for _, path, *_ in found} == {"plain"}
    assert not any(found.values()), found


@pytest.mark.parametrize(("width", "arch"), [(128, 80), (96, 120)])
def test_where_products_are_made_warp_by_warp(width: int, arch: int) -> None:
    """Tiles of Hopper spilled 236 bytes on an A100, of dk and dv; with 99 KB of memory loops waited for every tile."""
    found = list(itertools.islice(run(arch, cases=[Case(BF16, width, width, 4)]), 2))
    assert [record["kernel"] for record in found] == ["forward", "backward_keys"]
    assert {record["path"] for record in found} == {"plain"}
    assert not any(record["problems"] for record in found), found


@pytest.mark.parametrize("path", ["plain", "gluon"])
@pytest.mark.parametrize("features", [(), ("window", "bias"), ("window", "alibi")])
def test_a_new_length_compiles_nothing(path: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton specialises on is the same for every number of tokens, in all kernels."""
    expected, keys = ["forward", *BACKWARD[: 2 + (path == "plain" and not features)]], []
    if path == "gluon" and "bias" in features:
        expected.clear()
    if path == "gluon" and "alibi" in features:
        expected += ["values", "prologue"]
    for tokens in (256, 333, 1008, 1001):
        monkeypatch.setattr(bench_kernel, "_TOKENS", tokens)
        launches = list(bench_kernel._launches(Case(BF16, 64, 64, 4, features), path, 90))
        assert [launch.kernel.__name__ for launch in launches] == expected
        keys.append([_specialised(launch) for launch in launches])
    assert all(key == keys[0] for key in keys)


@pytest.mark.parametrize("wide", [False, True])
def test_values_assert_what_they_keep(wide: bool) -> None:
    """Where a buffer has 64 bits; no instruction is spent on one of 32."""
    launches = bench_kernel._launches(Case(BF16, 64, 64, 4, ("alibi",)), "gluon", 90)
    found = {launch.kernel.__name__: launch for launch in launches}
    for launch in (found["values"], found["prologue"]):
        depth = launch.arguments["buffer_0"]
        given = {**launch.arguments, "buffer_0": depth.long() if wide else depth}
        compiled = compile_to("ptx", replace(launch, arguments=given), 90)
        assert ("call.uni __assertfail" in compiled.asm["ptx"]) == wide


def test_lengths_are_arguments() -> None:
    """No length is a constant of the kernel or an assumption about its divisibility."""
    (launch, of_keys, *_) = bench_kernel._launches(Case(BF16, 64, 64), "plain", 90)
    special = {parameter.name for parameter in launch.kernel.params if not parameter.do_not_specialize}
    assert not special & {"queries", "keys", "query_base", "key_base"}
    constants = {"GROUP", "BLOCK_M", "BLOCK_N", "PRECISION"}
    for one, more in ((launch, []), (of_keys, ["q_token", "grad_token"])):  # those rows never lie a length apart
        assert {parameter.name for parameter in one.kernel.params if parameter.is_constexpr} == {*constants, *more}


GOOD = CompileReport(168, 0, 150_000, wgmma=24, tcgen05=0, mma=0, setmaxnreg=True, warnings=(), overlap=(64,) * 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spill_bytes": 400}, "spills 400 bytes"),
        ({"shared_bytes": 240_000}, "needs 240000 bytes of shared memory"),
        ({"setmaxnreg": False}, "not warp-specialised"),
        ({"mma": 3}, "by warpgroups only"),
        ({"wgmma": 0}, "by warpgroups only"),
        ({"warnings": ("C7512",)}, "serialises its products"),
        ({"races": ("%q is read when not held",)}, "when not held"),
        ({"prefetch": (2, 0)}, "loads nothing ahead"),
        ({"overlap": (64, 64, 2, 64)}, "no exponentials while it multiplies"),
    ],
)
def test_every_bound_can_be_missed(change: dict[str, Any], text: str) -> None:
    assert not problems(GOOD, BF16, "forward", "gluon", 90)
    (problem,) = problems(replace(GOOD, **change), BF16, "forward", "gluon", 90)
    assert text in problem


def test_command_prints_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On Ampere, where there is one form only; by a Triton in a folder, which is the installed one renamed."""
    monkeypatch.setattr(bench_kernel, "CASES", (Case(torch.float16, 64, 64, 1, ("sinks",)),))
    installed = Path(triton.__file__).parent
    other = tmp_path / "other" / "triton"
    other.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name == "__init__.py":
            text = path.read_text(encoding="utf-8")
            assert f"'{triton.__version__}'" in text
            (other / path.name).write_text(text.replace(triton.__version__, "99.9.9"), encoding="utf-8")
        elif path.name != "__pycache__":
            (other / path.name).symlink_to(path)
    result = CliRunner().invoke(app, ["bench", "kernel", "--arch", "sm_80", "--json", "--triton", str(other.parent)])
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert {record["triton"] for record in records} == {"99.9.9"} and str(other.parent) not in sys.path
    keys = {"kernel", "path", "dtype", "head_dim", "head_dim_v", "features", "registers", "spill_bytes"}
    assert all(keys | {"shared_bytes", "wgmma", "setmaxnreg"} <= record.keys() for record in records)
    assert [record["kernel"] for record in records] == ["forward", *BACKWARD]


def test_command_refuses_a_folder_without_triton(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder that holds the package triton.*pip install"):
        bench_kernel.run_with_progress("sm_90", "plain", json=True, triton=tmp_path)


def test_command_refuses_other_architectures() -> None:
    result = CliRunner().invoke(app, ["bench", "kernel", "--arch", "sm_75"])
    assert result.exit_code != 0 and "before sm_80 FlexAttention runs" in str(result.exception)
