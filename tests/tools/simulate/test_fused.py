"""T3: a product and its reduce-scatter, tracked and triggered."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treefx.tools.simulate.hardware.fused import arbitration_of, run_fused, run_gemm
from treefx.tools.simulate.hardware.gemm import Gemm, plan_waves
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.hardware.memory import Arbitration
from treefx.tools.simulate.hardware.ring import reduce_scatter
from treefx.tools.simulate.hardware.tracker import SimulationError, Tracker

MACHINE = Machine(group_bytes=2.0**19)
GEMM = Gemm(4096, 1024, 4096)
GEMMS = st.builds(Gemm, st.integers(2, 32).map(lambda n: 128 * n), st.integers(64, 2048), st.integers(200, 4096))
RATES = st.sampled_from([5e10, 1.5e11, 1e12])


@settings(max_examples=40, deadline=None)
@given(GEMMS, st.integers(2, 12), RATES, RATES, st.sampled_from([inf, 1e4]))
def test_bytes_are_kept_and_time_lies_between_the_longest_part_and_the_sum(
    gemm: Gemm, ranks: int, link: float, memory: float, occupancy: float
) -> None:
    machine = replace(MACHINE, link_bytes_per_second=link, memory_bytes_per_second=memory)
    waves = plan_waves(gemm, machine, stores_cached=False)
    run = run_fused(waves, ranks, machine, Arbitration(occupancy))
    chunk = waves.output / ranks
    assert run.wire_bytes == pytest.approx((ranks - 1) * chunk)
    assert run.traffic.total("rs reads") == pytest.approx((ranks - 2) * chunk, abs=1.0)
    assert run.traffic.total("rs stores") == pytest.approx((ranks - 1) * chunk)
    assert run.traffic.total("gemm stores") == pytest.approx((ranks - 1) * chunk)
    parts = run.compute_seconds, run.memory_seconds, run.wire_seconds
    assert run.memory_peak <= 1.0 + 1e-9
    assert max(parts) <= run.seconds * (1 + 1e-6)
    assert run.seconds <= (sum(parts) + (ranks - 1) * machine.link_latency_seconds) * (1 + 1e-6)


def test_where_nothing_is_short_the_product_hides_the_sum_but_for_its_last_hop() -> None:
    machine = replace(MACHINE, memory_bytes_per_second=1e18, link_bytes_per_second=1e15, link_latency_seconds=0.0)
    waves = plan_waves(GEMM, machine, stores_cached=False)
    assert run_fused(waves, 8, machine, Arbitration()).seconds == pytest.approx(waves.count * waves.seconds, rel=1e-3)


def test_where_only_the_link_is_short_the_link_never_rests() -> None:
    machine = replace(MACHINE, memory_bytes_per_second=1e18, link_bytes_per_second=1e9, link_latency_seconds=0.0)
    waves = plan_waves(GEMM, machine, stores_cached=False)
    run = run_fused(waves, 8, machine, Arbitration())
    assert run.seconds == pytest.approx(waves.seconds + run.wire_seconds, rel=1e-3)


@pytest.mark.parametrize("occupancy", [inf, 1e4])
def test_a_faster_link_is_never_slower_where_memory_is_not_short(occupancy: float) -> None:
    machine = replace(MACHINE, memory_bytes_per_second=1e14)
    waves = plan_waves(GEMM, machine, stores_cached=False)
    runs = [
        run_fused(waves, 8, replace(machine, link_bytes_per_second=rate), Arbitration(occupancy)).seconds
        for rate in (10e9, 30e9, 75e9, 150e9, 600e9)
    ]
    assert all(faster <= slower * (1 + 1e-9) for slower, faster in pairwise(runs))


def test_the_same_run_twice_is_the_same_to_the_last_bit() -> None:
    waves = plan_waves(GEMM, MACHINE, stores_cached=False)
    assert run_fused(waves, 8, MACHINE, Arbitration()) == run_fused(waves, 8, MACHINE, Arbitration())


def test_finer_groups_change_little() -> None:
    waves = plan_waves(Gemm(8192, 1064, 4256), MACHINE, stores_cached=False)
    coarse, fine = [
        run_fused(waves, 8, replace(MACHINE, group_bytes=size), Arbitration()).seconds for size in (2.0**19, 2.0**17)
    ]
    assert coarse == pytest.approx(fine, rel=0.03)


def test_compute_first_protects_a_product_that_reads_much() -> None:
    """T-NLG, FC-2 on 8 GPUs: bursts of communication stand before its reads unless it goes first (section 6.1.2)."""
    plain = plan_waves(Gemm(8192, 2128, 4256), MACHINE, stores_cached=True)
    waves = plan_waves(Gemm(8192, 2128, 4256), MACHINE, stores_cached=False)
    alone = run_gemm(plain, MACHINE).seconds
    in_order = run_fused(waves, 8, MACHINE, Arbitration()).seconds
    first = run_fused(waves, 8, MACHINE, arbitration_of(waves, MACHINE)).seconds
    assert first < 0.97 * in_order
    assert first < alone + 0.3 * reduce_scatter(plain.output, 8, MACHINE).seconds


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_tracker_that_fires_early_is_found(ranks: int) -> None:
    waves = plan_waves(GEMM, MACHINE, stores_cached=False)
    with pytest.raises(SimulationError, match="tracker fires after 1 update"):
        run_fused(waves, ranks, MACHINE, Arbitration(), updates=1)


def test_a_tracker_that_waits_for_too_much_is_found() -> None:
    waves = plan_waves(GEMM, MACHINE, stores_cached=False)
    with pytest.raises(SimulationError, match="still wait"):
        run_fused(waves, 8, MACHINE, Arbitration(), updates=3)


def test_a_tracker_counts_ranks_and_entries() -> None:
    fired: list[tuple[object, int]] = []
    tracker = Tracker(lambda group, ranks: fired.append((group, ranks)))
    tracker.update("a", 1)
    tracker.update("b", 3)
    tracker.update("a", 2)
    assert fired == [("a", 3)] and tracker.peak == 2
    with pytest.raises(SimulationError, match="still wait"):
        tracker.check_empty()
    with pytest.raises(SimulationError, match="one came after it"):
        tracker.update("a", 1)
