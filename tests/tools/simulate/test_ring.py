"""Collectives alone on a ring: bytes, rates and the closed form."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.hardware.ring import all_gather, reduce_scatter

MACHINE = Machine()
INSTANT = replace(MACHINE, memory_bytes_per_second=1e18)
RANKS = st.integers(2, 16)
SIZES = st.floats(1e5, 5e7)


@settings(max_examples=30, deadline=None)
@given(SIZES, RANKS)
def test_an_all_reduce_takes_its_closed_form_where_memory_costs_nothing(size: float, ranks: int) -> None:
    step = size / ranks / INSTANT.link_bytes_per_second + INSTANT.link_latency_seconds
    seconds = reduce_scatter(size, ranks, INSTANT).seconds + all_gather(size, ranks, INSTANT).seconds
    assert seconds == pytest.approx(2 * (ranks - 1) * step, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(SIZES, RANKS, st.sampled_from([20e9, 1e12]))
def test_no_link_or_memory_is_used_above_its_rate(size: float, ranks: int, rate: float) -> None:
    machine = replace(MACHINE, memory_bytes_per_second=rate)
    for run in (
        reduce_scatter(size, ranks, machine),
        reduce_scatter(size, ranks, machine, near_memory=True),
        all_gather(size, ranks, machine),
    ):
        assert run.wire_bytes == pytest.approx((ranks - 1) / ranks * size)
        assert run.wire_bytes <= run.seconds * machine.link_bytes_per_second * (1 + 1e-9)
        assert run.memory_peak <= 1.0 + 1e-9
        latency = (ranks - 1) * machine.link_latency_seconds
        assert max(run.wire_seconds, run.memory_seconds) <= run.seconds * (1 + 1e-9)
        assert run.seconds <= (run.wire_seconds + run.memory_seconds + latency) * (1 + 1e-6)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_bytes_of_a_reduce_scatter(ranks: int) -> None:
    """Reads: the first chunk, then two in each step; stores: what arrives, and the sum. Near memory: one, and none."""
    size, chunk = 16e6, 16e6 / ranks
    plain, near = reduce_scatter(size, ranks, MACHINE), reduce_scatter(size, ranks, MACHINE, near_memory=True)
    assert plain.traffic.total("rs reads") == pytest.approx((2 * ranks - 1) * chunk)
    assert plain.traffic.total("rs stores") == pytest.approx(ranks * chunk)
    assert near.traffic.total("rs reads") == pytest.approx((ranks - 1) * chunk)
    assert near.traffic.total("rs stores") == pytest.approx((ranks - 1) * chunk)


def test_a_faster_link_is_never_slower() -> None:
    rates = [20e9, 75e9, 150e9, 300e9, 3e12]
    seconds = [reduce_scatter(5e7, 8, replace(MACHINE, link_bytes_per_second=rate)).seconds for rate in rates]
    assert seconds == sorted(seconds, reverse=True)
