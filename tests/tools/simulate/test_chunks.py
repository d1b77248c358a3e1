"""Chunks in software: the closed form, the gate, and links that are emulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treefx.errors import InputError
from treefx.tools.simulate.chunks import Link, best_chunks, run_chunks, wire_bytes

SECONDS = st.floats(1e-5, 1e-1)
SIZES = st.floats(1e3, 1e9)
RATES = st.floats(1e8, 1e12)
CHUNKS = st.integers(1, 16)


@given(SECONDS, SIZES, RATES, CHUNKS)
def test_chunks_form_a_pipeline_of_two_stages(work: float, size: float, rate: float, chunks: int) -> None:
    sent = size / rate
    line = run_chunks(work, size, Link(bytes_per_second=rate), chunks)
    assert line.seconds == pytest.approx((work + sent + (chunks - 1) * max(work, sent)) / chunks)
    assert max(work, sent) <= line.seconds * (1 + 1e-9) and line.seconds <= (work + sent) * (1 + 1e-9)
    assert len(line.gemms) == len(line.collectives) == chunks
    assert sum(end - start for start, end in line.gemms) == pytest.approx(work)
    assert [issued for issued, _ in line.collectives] == [end for _, end in line.gemms]


@given(SECONDS, SIZES, RATES, CHUNKS, st.floats(0.0, 0.5), st.floats(0.0, 1e-3))
def test_a_faster_link_is_never_slower(
    work: float, size: float, rate: float, chunks: int, taken: float, extra: float
) -> None:
    slow, fast = [
        run_chunks(work, size, Link(bytes_per_second=r, compute_taken=taken, chunk_seconds=extra), chunks).seconds
        for r in (rate, 2 * rate)
    ]
    assert fast <= slow * (1 + 1e-9)


@given(SECONDS, SIZES, RATES, st.floats(0.0, 0.9), st.floats(0.0, 1e-2))
def test_the_gate_is_never_slower_than_leaving_alone(
    work: float, size: float, rate: float, taken: float, extra: float
) -> None:
    link = Link(bytes_per_second=rate, compute_taken=taken, chunk_seconds=extra)
    chunks = best_chunks(work, size, link)
    alone = run_chunks(work, size, link, 1).seconds
    assert chunks == 1 or run_chunks(work, size, link, chunks).seconds < 0.98 * alone


def test_units_that_the_collective_takes_slow_the_product_only_while_it_runs() -> None:
    link = Link(bytes_per_second=1e9, compute_taken=0.5)
    line = run_chunks(2.0, 1e9, link, 2)
    # The second chunk overlaps with half a second of the first collective at half speed: a quarter of a second lost.
    assert line.gemms == [(0.0, 1.0), (1.0, 2.25)]
    assert line.seconds == pytest.approx(2.75)


def test_a_collective_that_costs_nothing_or_launches_that_cost_much_leave_the_product_alone() -> None:
    assert best_chunks(1e-3, 1e3, Link(bytes_per_second=1e12)) == 1
    assert best_chunks(1e-3, 1e8, Link(bytes_per_second=1e11, chunk_seconds=1e-3)) == 1
    assert best_chunks(1e-3, 0.0, Link(bytes_per_second=1e11)) == 1
    assert best_chunks(0.0, 1e8, Link(bytes_per_second=1e11)) == 1


@pytest.mark.parametrize(
    ("ratio", "measured"),
    [
        (0.5, {1: 76, 2: 61, 4: 58, 8: 70}),
        (0.5, {1: 79, 2: 61, 4: 59, 8: 67}),
        (1.0, {1: 92, 2: 88, 4: 77, 8: 77}),
        (2.0, {1: 138, 2: 126, 4: 112, 8: 107}),
        (2.0, {1: 122, 2: 101, 4: 91, 8: 88}),
    ],
)
def test_the_best_number_of_chunks_on_an_emulated_link_is_the_one_measured(
    ratio: float, measured: dict[int, int]
) -> None:
    """An MLP on two gloo processes whose link sleeps, in ms; a chunk costs 2 ms there (the slope without a link).

    A sixth row was measured, an all-reduce at 1.0, where 8 chunks were best and 4 are predicted: see
    examples/results/t3-simulator-2026-11-22.md.
    """
    work = measured[1] * 1e-3 / (1 + ratio)
    link = Link.as_slow_as(ratio, work, 16e6, chunk_seconds=2e-3)
    chunks = best_chunks(work, 16e6, link, candidates=tuple(measured))
    assert measured[chunks] == min(measured.values())


def test_a_link_stated_by_its_ratio_takes_that_long() -> None:
    link = Link.as_slow_as(2.0, 1e-3, 5e6)
    assert run_chunks(1e-3, 5e6, link, 1).seconds == pytest.approx(3e-3)


def test_bytes_of_a_ring() -> None:
    assert wire_bytes("all_reduce", 8e6, 4) == 12e6
    assert wire_bytes("reduce_scatter", 8e6, 4) == wire_bytes("all_gather", 8e6, 4) == 6e6
    with pytest.raises(InputError, match="expected a collective among"):
        wire_bytes("broadcast", 8e6, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bytes_per_second": 0.0},
        {"bytes_per_second": float("nan")},
        {"bytes_per_second": 1e9, "compute_taken": 1.0},
        {"bytes_per_second": 1e9, "latency_seconds": -1.0},
        {"bytes_per_second": 1e9, "chunk_seconds": -1.0},
    ],
)
def test_a_link_that_cannot_be_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected"):
        Link(**arguments)


def test_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 chunk"):
        run_chunks(1e-3, 1e6, Link(bytes_per_second=1e9), 0)
    with pytest.raises(InputError, match="nan s"):
        best_chunks(float("nan"), 1e6, Link(bytes_per_second=1e9))
    with pytest.raises(InputError, match="a ratio"):
        Link.as_slow_as(0.0, 1e-3, 1e6)
