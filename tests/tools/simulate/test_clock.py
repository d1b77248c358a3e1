"""Events happen in order of time, then of setting; cancelled events leave no trace."""

from treefx.tools.simulate.hardware.clock import Clock
from treefx.tools.simulate.hardware.wire import Wire


def test_events_happen_in_order() -> None:
    clock, seen = Clock(), []
    clock.after(2.0, lambda: seen.append("late"))
    clock.after(1.0, lambda: seen.append("first"))
    clock.after(1.0, lambda: clock.after(0.0, lambda: seen.append("third")))
    clock.after(1.0, lambda: seen.append("second"))
    assert clock.run() == 2.0
    assert seen == ["first", "second", "third", "late"]


def test_a_cancelled_event_neither_happens_nor_takes_time() -> None:
    clock, seen = Clock(), []
    clock.after(1.0, lambda: seen.append("kept"))
    clock.cancel(clock.after(5.0, lambda: seen.append("cancelled")))
    clock.cancel(None)
    assert clock.run() == 1.0
    assert seen == ["kept"]


def test_a_link_sends_one_message_after_another() -> None:
    clock, times = Clock(), []
    wire = Wire(clock, rate=10.0, latency=0.5)
    for size in (10.0, 20.0):
        wire.send(size, lambda: times.append(clock.now))
    clock.run()
    assert times == [1.5, 3.5]
    assert wire.sent == wire.received == 30.0 and wire.busy == 3.0
