"""No warp-specialised kernel overwrites what is still being read; one that would is found, real or planted."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gpu.planting import planted, template
from tests.kernels.gpu.versions import specialises_keys
from treefx.bench.attention import kernel as bench_kernel
from treefx.bench.attention.kernel import CASES, MORE_CASES, Case, has_form, run
from treefx.kernels.gpu.inspection.ahead_of_time import compile_kernel
from treefx.kernels.gpu.inspection.barriers import races, unmet_releases
from treefx.kernels.gpu.triton_tree.small_launches import scratch_bytes

pytestmark = pytest.mark.usefixtures("fresh_caches")
SMALL = Case(torch.bfloat16, 64, 64, 4)
SPECIALISED = [case for case in (*CASES, *MORE_CASES) if has_form(case, "warp", 90)]

RESHAPED = """
{% macro reshaped_descriptors(name, pointer, prefix, chunks) %}
{% for chunk in chunks %}
{{ name }}_box_{{ loop.index0 }} = tl.make_tensor_descriptor(
    {{ pointer }} + batch.to(tl.int64) * {{ prefix }}_batch,
    shape=[queries, kv_heads, GROUP, {{ chunk[2] }}],
    strides=[{{ prefix }}_token, GROUP * {{ prefix }}_head, {{ prefix }}_head, 1],
    block_shape=[BLOCK_M // GROUP, 1, GROUP, {{ chunk[1] }}],
)
{% endfor %}
{% endmacro %}
{% macro load_reshaped(name, chunks) %}
{% for chunk in chunks %}
{{ name }}_{{ loop.index0 }} = {{ name }}_box_{{ loop.index0 }}.load(
    [block * (BLOCK_M // GROUP), kv_head, 0, {{ chunk[0] }}]
).reshape([BLOCK_M, {{ chunk[1] }}])
{% endfor %}
{% endmacro %}
"""
"""How dk and dv once read queries, as [tokens, key heads, members, features]: the reshape is taken for the reader."""


def texts() -> tuple[str, str]:
    """Return the TTGIR and the PTX of dk and dv."""
    (launch,) = (one for one in bench_kernel._launches(SMALL, "warp", 90) if one.kernel.__name__ == "backward_keys")
    _, compiled = compile_kernel(launch, 90)
    return compiled.asm["ttgir"], compiled.asm["ptx"]


@pytest.fixture(scope="module")
def right(fresh_caches: None) -> tuple[str, str]:
    return texts()


def reshaped() -> str:
    """Return the template with the old form of dk and dv in it."""
    before, name, rest = template("warp").partition("def backward_keys(")
    kernel, after, others = rest.partition("def backward_queries(")
    for old, new in (("row_descriptors(", "reshaped_descriptors("), ("load_packed_rows(", "load_reshaped(")):
        assert kernel.count(old) == 2, "of Q and of the gradient"
        kernel = kernel.replace(old, new)
    imports, line, others_before = before.partition("\n")
    return "".join((imports, RESHAPED, line, others_before, name, kernel, after, others))


@pytest.mark.sample(13)
@pytest.mark.parametrize("case", SPECIALISED, ids=str)
def test_every_specialised_kernel(case: Case) -> None:
    """Of keys from outside too: once for them, and once for the own keys, which go on from their results."""
    found = list(run(90, paths=("warp",), cases=[case]))
    assert not any(record["problems"] for record in found)
    specialised = [record["kernel"] for record in found if record["kernel"] not in ("prologue", "values")]
    kernels = ["forward", "backward_keys", "backward_queries"]
    if not specialises_keys(case.features):
        kernels.remove("backward_keys")
    assert specialised == kernels * (1 + ("boundary" in case.features))
    assert all(record["race_free"] for record in found if record["kernel"] in kernels)


@pytest.mark.parametrize("kernel", ["forward", "backward_keys"])
def test_descriptors_take_the_memory_that_is_counted(kernel: str) -> None:
    """By what the compiler demands for every program, of a boundary's keys and of others."""
    launches = bench_kernel._launches(replace(SMALL, features=("boundary",)), "warp", 90)
    sizes = []
    for launch in (one for one in launches if one.kernel.__name__ == kernel):
        _, compiled = compile_kernel(launch, 90)
        has_low = launch.arguments["Low"] is not None
        sizes.append(compiled.metadata.global_scratch_size)
        assert sizes[-1] == scratch_bytes(launch.kernel, has_low=has_low)
    assert len(set(sizes)) == 2


def test_the_form_that_dk_and_dv_had_is_found() -> None:
    """Queries and gradients were released before the first product, in both groups of warps."""
    with planted("warp", reshaped()):
        ttgir, _ = texts()
    assert "memdesc_reshape" in ttgir
    assert {" ".join(text.split()[:2]).rstrip("0123456789_") for text in races(ttgir)} == {
        f"partition{number}: %{name}_box" for number in (0, 1) for name in ("q", "grad")
    }
    assert all("is read by ttng.warp_group_dot when not held" in text for text in races(ttgir))


def find(text: str, *needles: str, after: int = 0) -> int:
    """Return the number of the first line after another that has all the needles."""
    return next(
        number
        for number, line in enumerate(text.splitlines())
        if number > after and all(needle in line for needle in needles)
    )


def changed(text: str, number: int, *instead: str) -> str:
    """Return the text with one line left out, or others in its place."""
    lines = text.splitlines()
    return "\n".join([*lines[:number], *instead, *lines[number + 1 :]])


def test_one_line_makes_a_race(right: tuple[str, str]) -> None:
    """In the loop of the first group of warps that multiplies: the wait for Q, or the release of lse, left out."""
    ttgir, _ = right
    assert races(ttgir) == []
    loop = find(ttgir, "scf.for", after=find(ttgir, "partition0("))
    (text,) = races(changed(ttgir, find(ttgir, "wait_barrier", after=loop)))
    assert text.startswith("partition0: %q_box") and "is read by ttng.warp_group_dot when not held" in text
    (text,) = races(changed(ttgir, find(ttgir, "arrive_barrier", after=loop)))
    assert text.startswith("partition0: %lse_box") and "is waited for again before it is released" in text


def test_a_copy_into_a_buffer_that_may_be_full_is_found(right: tuple[str, str]) -> None:
    """The warps that load wait for the second group, whose keys are others, and no more for the first.

    Without any wait, of what is copied in the loop: what is filled once need not be empty.
    """
    ttgir, _ = right
    loop = find(ttgir, "scf.for", after=find(ttgir, "default {"))
    (text,) = races(changed(ttgir, find(ttgir, "wait_barrier", after=loop)))
    assert "%q_box" in text and "is waited for again before it is released" in text
    alone = "\n".join(line for line in ttgir.splitlines() if "wait_barrier" not in line or "array<i32: 0>" not in line)
    assert sum("is copied without a wait for an empty buffer" in text for text in races(alone)) == 4


def test_products_under_way_are_readers(right: tuple[str, str]) -> None:
    """What a Triton would make whose products are asynchronous in specialised loops, without and with a wait."""
    ttgir, _ = right
    number = find(ttgir, "warp_group_dot", after=find(ttgir, "scf.for", after=find(ttgir, "partition0(")))
    under_way = ttgir.splitlines()[number].replace("inputPrecision", "isAsync = true, inputPrecision")
    found = races(changed(ttgir, number, under_way))
    assert len(found) == 2 and all("is released while a product of it is under way" in text for text in found)
    wait = "%settled = ttng.warp_group_dot_wait %dot {pendings = 0 : i32} : tensor<64x64xf32>"
    assert races(changed(ttgir, number, under_way, wait)) == []


def test_what_cannot_be_followed_is_a_hazard(right: tuple[str, str]) -> None:
    ttgir, _ = right
    number = find(ttgir, "wait_barrier", after=find(ttgir, "partition0("))
    (text,) = races(changed(ttgir, number, "scf.if %true {", ttgir.splitlines()[number], "}"))
    assert "stands inside scf.if, which cannot be followed" in text
    assert races("module {}") == ["no buffer was found that one group of warps fills for another"]


@pytest.mark.parametrize(
    ("needle", "missing"), [("wgmma.wait_group", "its product is complete"), ("bar.sync", "all warps of the group met")]
)
def test_one_thread_releases_for_all(needle: str, missing: str, right: tuple[str, str]) -> None:
    _, ptx = right
    assert unmet_releases(ptx) == []
    found = unmet_releases("\n".join(line for line in ptx.splitlines() if needle not in line))
    assert found and all(missing in text for text in found)
