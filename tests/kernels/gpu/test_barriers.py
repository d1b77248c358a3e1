"""No group of warps overwrites what another still reads; a kernel in which one would is found, real or planted.

In Gluon, and in what a pass of Triton's divides between warps.
"""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gpu.specialised_by_pass import launch as launch_of_pass
from tests.kernels.gpu.stages import compile_to
from treefx.kernels.gpu.triton_tree.small_launches import Launch, scratch_bytes
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.bench.attention.kernel import Case
from treefx.tools.kernels.barriers import races, unmet_releases

pytestmark = pytest.mark.usefixtures("fresh_caches")
SMALL = Case(torch.bfloat16, 64, 64, 4)


def in_gluon(kernel: str, case: Case = SMALL) -> list[Launch]:
    return [one for one in bench_kernel._launches(case, "gluon", 90) if one.kernel.__name__ == kernel]


@dataclass(frozen=True)
class Kernel:
    """dk and dv as they were compiled.

    Attributes:
        ttgir: of Triton.
        ptx: what became of it.
        multiplies: how the first group of warps begins that does.
        loads: how that which does begins.
    """

    ttgir: str
    ptx: str
    multiplies: str
    loads: str

    @property
    def loop(self) -> int:
        """The loop of the first group that multiplies."""
        return find(self.ttgir, "scf.for", after=find(self.ttgir, self.multiplies))


def compiled(launch: Launch) -> tuple[str, str]:
    """Return the TTGIR and the PTX of a launch."""
    kernel = compile_to("ptx", launch, 90)
    return kernel.asm["ttgir"], kernel.asm["ptx"]


@pytest.fixture(scope="module")
def of_gluon(fresh_caches: None) -> Kernel:
    return Kernel(*compiled(*in_gluon("backward_keys")), "default {", "partition1(")


@pytest.fixture(scope="module")
def of_pass(fresh_caches: None) -> Kernel:
    return Kernel(*compiled(launch_of_pass(reshaped=False)), "partition0(", "default {")


@pytest.fixture(params=["of_gluon", "of_pass"])
def right(request: pytest.FixtureRequest) -> Kernel:
    found: Kernel = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("kernel", ["forward", "backward_queries"])
def test_descriptors_take_the_memory_that_is_counted(kernel: str) -> None:
    """By what the compiler demands for every program, of a boundary's keys and of others."""
    sizes = []
    for launch in in_gluon(kernel, replace(SMALL, features=("boundary",))):
        sizes.append(compile_to("llir", launch, 90).metadata["global_scratch_size"])
        assert sizes[-1] == scratch_bytes(launch.kernel, has_low=launch.arguments["Low"] is not None)
    assert len(set(sizes)) == 2


def test_the_form_that_dk_and_dv_had_is_found() -> None:
    """Queries and gradients were released before the first product, in both groups of warps."""
    ttgir = compile_to("ttgir", launch_of_pass(reshaped=True), 90).asm["ttgir"]
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


def test_one_line_makes_a_race(right: Kernel) -> None:
    """In the loop of the first group of warps that multiplies: the wait for queries, or a release, left out."""
    assert races(right.ttgir) == []
    group = right.multiplies.rstrip(" ({")
    first, *others = races(changed(right.ttgir, find(right.ttgir, "wait_barrier", after=right.loop)))
    assert first.startswith(f"{group}: %") and "is read by ttng.warp_group_dot when not held" in first
    assert all(text.startswith(group) and text.endswith("when not held") for text in others)
    found = races(changed(right.ttgir, find(right.ttgir, "arrive_barrier", after=right.loop)))
    assert found and all(text.startswith(f"{group}: %") for text in found)
    assert all("is waited for again before it is released" in text for text in found)


def test_each_release_is_one_of_its_own_where_a_pass_makes_them(of_pass: Kernel) -> None:
    ttgir = of_pass.ttgir
    (text,) = races(changed(ttgir, find(ttgir, "wait_barrier", after=of_pass.loop)))
    assert text.startswith("partition0: %q_box")
    (text,) = races(changed(ttgir, find(ttgir, "arrive_barrier", after=of_pass.loop)))
    assert text.startswith("partition0: %lse_box")


def test_a_copy_into_a_buffer_that_may_be_full_is_found(right: Kernel) -> None:
    """Without any wait, of copies in the loop: a buffer filled once need not be empty."""
    lines, begin = right.ttgir.splitlines(), find(right.ttgir, right.loads)
    loop = find(right.ttgir, "scf.for", after=begin)
    end = next(number for number in range(loop, len(lines)) if lines[number].strip().startswith("}"))
    waits = [number for number in range(begin, end) if "wait_barrier" in lines[number]]
    found = races("\n".join(line for number, line in enumerate(lines) if number not in waits))
    assert waits and sum("is copied without a wait for an empty buffer" in text for text in found) == 4


def test_a_copy_that_waits_for_one_group_alone_is_found(of_pass: Kernel) -> None:
    """The warps that load wait for the second group, whose keys are others, and no more for the first."""
    loop = find(of_pass.ttgir, "scf.for", after=find(of_pass.ttgir, of_pass.loads))
    (text,) = races(changed(of_pass.ttgir, find(of_pass.ttgir, "wait_barrier", after=loop)))
    assert "%q_box" in text and "is waited for again before it is released" in text


def test_products_under_way_are_readers(of_pass: Kernel) -> None:
    """What a Triton would make whose products are asynchronous in specialised loops, without and with a wait."""
    ttgir = of_pass.ttgir
    number = find(ttgir, "warp_group_dot", after=of_pass.loop)
    under_way = ttgir.splitlines()[number].replace("inputPrecision", "isAsync = true, inputPrecision")
    found = races(changed(ttgir, number, under_way))
    assert len(found) == 2 and all("is released while a product of it is under way" in text for text in found)
    wait = "%settled = ttng.warp_group_dot_wait %dot {pendings = 0 : i32} : tensor<64x64xf32>"
    assert races(changed(ttgir, number, under_way, wait)) == []


def test_what_cannot_be_followed_is_a_hazard(right: Kernel) -> None:
    number = find(right.ttgir, "wait_barrier", after=find(right.ttgir, right.multiplies))
    (text,) = races(changed(right.ttgir, number, "scf.if %true {", right.ttgir.splitlines()[number], "}"))
    assert "stands inside scf.if, which cannot be followed" in text
    assert races("module {}") == ["no buffer was found that one group of warps fills for another"]


@pytest.mark.parametrize(
    ("needle", "missing"), [("wgmma.wait_group", "its product is complete"), ("bar.sync", "all warps of the group met")]
)
def test_one_thread_releases_for_all(needle: str, missing: str, right: Kernel) -> None:
    assert unmet_releases(right.ptx) == []
    found = unmet_releases("\n".join(line for line in right.ptx.splitlines() if needle not in line))
    assert found and all(missing in text for text in found)
