"""A product alone: the roofline, and reads behind the cache."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treefx.tools.simulate.hardware.fused import run_gemm
from treefx.tools.simulate.hardware.gemm import Gemm, hit_rate, plan_waves
from treefx.tools.simulate.hardware.machine import SOURCES, Machine

MACHINE = Machine()
GEMMS = st.builds(Gemm, st.integers(1, 64).map(lambda n: 128 * n), st.integers(32, 4096), st.integers(1, 9000))


@settings(max_examples=40, deadline=None)
@given(GEMMS, st.sampled_from([50e9, 1e12, 1e18]))
def test_a_product_alone_takes_its_roofline(gemm: Gemm, rate: float) -> None:
    machine = replace(MACHINE, memory_bytes_per_second=rate)
    waves = plan_waves(gemm, machine, stores_cached=True)
    run = run_gemm(waves, machine)
    moved = (waves.reads + machine.store_cost * waves.output) / rate
    roofline = sum(max(waves.seconds, moved * waves.tiles_of(wave) / waves.tiles) for wave in range(waves.count))
    assert run.seconds == pytest.approx(roofline, rel=1e-6)
    assert run.seconds >= max(gemm.flops / machine.flops, moved) * (1 - 1e-6)


@given(GEMMS)
def test_inputs_are_read_at_least_once_and_stores_past_the_cache_never_cost_reads(gemm: Gemm) -> None:
    cached = plan_waves(gemm, MACHINE, stores_cached=True)
    past = plan_waves(gemm, MACHINE, stores_cached=False)
    once = 2.0 * gemm.inner * (gemm.rows + gemm.columns)
    assert once * (1 - 1e-9) <= past.reads <= cached.reads * (1 + 1e-9)


def test_a_large_cache_reads_inputs_once_and_a_tiny_one_reads_them_for_every_pass() -> None:
    gemm = Gemm(16384, 1024, 4096)
    once = 2.0 * gemm.inner * (gemm.rows + gemm.columns)
    large = plan_waves(gemm, replace(MACHINE, cache_bytes=2.0**34), stores_cached=True)
    tiny = plan_waves(gemm, replace(MACHINE, cache_bytes=2.0**10), stores_cached=True)
    assert large.reads == pytest.approx(once)
    passes = 4096 // MACHINE.tile_columns
    waves_of_a_panel = 16384 / MACHINE.tile_rows / MACHINE.compute_units
    assert tiny.reads == pytest.approx(2.0 * gemm.inner * (gemm.rows * passes + gemm.columns * waves_of_a_panel))


def test_hits_fall_from_all_to_none_where_the_distance_passes_the_capacity() -> None:
    rates = [hit_rate(distance, 1e6, 24) for distance in (0.0, 0.3e6, 0.7e6, 1e6, 1.4e6, 3e6, 1e9)]
    assert rates[0] == 1.0 and rates[1] > 0.999 and rates[-1] == 0.0
    assert rates == sorted(rates, reverse=True)
    assert 0.4 < rates[3] < 0.6


def test_more_ways_make_the_fall_steeper() -> None:
    assert hit_rate(0.8e6, 1e6, 64) > hit_rate(0.8e6, 1e6, 8)
    assert hit_rate(1.2e6, 1e6, 64) < hit_rate(1.2e6, 1e6, 8)


def test_every_parameter_has_a_source() -> None:
    assert set(SOURCES) == set(Machine.__dataclass_fields__)
    kinds = {kind for kind, _ in SOURCES.values()}
    assert kinds == {"published", "read", "derived", "assumed", "calibrated", "resolution"}
