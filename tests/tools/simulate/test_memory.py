"""The memory's queues: every byte is served, never above the rate, and each lane gets its part."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treefx.tools.simulate.hardware.clock import Clock
from treefx.tools.simulate.hardware.memory import Arbitration, Lane, Memory

RATE = 1e9
JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 1e-2),  # when
        st.sampled_from(list(Lane)),
        st.floats(1e3, 1e7),  # bytes
        st.floats(1.0, 2.0),  # cost
        st.one_of(st.just(inf), st.floats(1e7, 2e9)),  # ceiling
        st.one_of(st.just(inf), st.floats(1e3, 1e6)),  # ahead
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(JOBS, st.sampled_from([inf, 1e6, 1e4]))
def test_all_that_is_asked_for_is_served_and_never_above_the_rate(jobs: list[tuple], occupancy: float) -> None:
    clock = Clock()
    memory = Memory(clock, RATE, Arbitration(occupancy))
    done: list[int] = []
    for index, (when, lane, size, cost, ceiling, ahead) in enumerate(jobs):

        def ask(index=index, lane=lane, size=size, cost=cost, ceiling=ceiling, ahead=ahead) -> None:
            memory.request(lane, size, lambda: done.append(index), cost=cost, ceiling=ceiling, ahead=ahead)

        clock.after(when, ask)
    seconds = clock.run()
    work = sum(size * cost for _, _, size, cost, _, _ in jobs) / RATE
    assert sorted(done) == list(range(len(jobs)))
    assert sum(memory.bytes_of.values()) == pytest.approx(sum(job[2] for job in jobs))
    assert memory.busy == pytest.approx(work, rel=1e-6)
    assert memory.peak <= 1.0 + 1e-9
    assert seconds >= work * (1.0 - 1e-6)


@given(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), st.lists(st.floats(1.0, 1e9), min_size=3, max_size=3))
def test_shares_are_wanted_and_nothing_is_left_idle(wants: list[float], queued: list[float]) -> None:
    shares = Arbitration().divide(wants, queued)
    assert all(share <= want + 1e-12 for share, want in zip(shares, wants, strict=True))
    assert sum(shares) == pytest.approx(min(1.0, sum(wants)))


def test_a_burst_of_communication_delays_reads_unless_compute_goes_first() -> None:
    wants, queued = [0.4, 0.0, 1.0], [5e5, 0.0, 5e6]
    in_order = Arbitration().divide(wants, queued)
    first = Arbitration(occupancy=1e4).divide(wants, queued)
    assert in_order[0] == pytest.approx(1 / 11)
    assert first[0] == pytest.approx(0.4) and first[2] == pytest.approx(0.6)


def test_a_job_takes_its_bytes_over_its_rate() -> None:
    clock = Clock()
    memory = Memory(clock, RATE)
    memory.request(Lane.READ, 1e6, lambda: None)
    assert clock.run() == pytest.approx(1e-3)
    memory.request(Lane.READ, 1e6, lambda: None, ceiling=RATE / 4)
    assert clock.run() == pytest.approx(5e-3)
    memory.request(Lane.STORE, 1e6, lambda: None, cost=2.0)
    assert clock.run() == pytest.approx(7e-3)
