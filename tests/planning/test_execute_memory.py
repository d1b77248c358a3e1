"""The memory tracker: both of its sources count the same bytes, which are the bytes held."""

import gc

import pytest
import torch

import treefx
from treefx.planning.cost.memory import Source, install_allocator, track_peak

SOURCES: tuple[Source, ...] = ("allocator", "profiler")
MEGABYTE = 1 << 20


def block() -> torch.Tensor:
    return torch.zeros(MEGABYTE // 4)


@pytest.fixture(scope="module", autouse=True)
def allocator() -> None:
    assert install_allocator(), "the tests need a C++ compiler, as inductor does"


@pytest.mark.parametrize("source", SOURCES)
def test_most_bytes_held_at_once(source: Source) -> None:
    with track_peak(source=source) as peak:
        first, second = block(), block()
        del first
        third, fourth = block(), block()
        del second, third, fourth
    assert 3 * MEGABYTE <= peak.bytes < 3 * MEGABYTE + 4096
    assert peak.source == source


@pytest.mark.parametrize("source", SOURCES)
def test_curve(source: Source) -> None:
    with track_peak(source=source, curve=True) as peak:
        first = block()
        second = block()
        del first, second
    held = [live for _, live in peak.curve]
    assert max(held) == peak.bytes
    assert held[-1] == 0
    moments = [moment for moment, _ in peak.curve]
    assert moments == sorted(moments)
    assert moments[0] >= 0


def test_what_was_there_before_does_not_count() -> None:
    kept = block()
    with track_peak() as peak:
        again = block()
    assert MEGABYTE <= peak.bytes < MEGABYTE + 4096
    del kept, again


def test_garbage_of_before_hides_nothing() -> None:
    gc.disable()
    try:
        cycle: list[object] = [block()]
        cycle.append(cycle)
        del cycle
        with track_peak() as peak:
            gc.collect()
            kept = block()
    finally:
        gc.enable()
    assert MEGABYTE <= peak.bytes < MEGABYTE + 4096
    del kept


def test_release_of_older_storage_makes_room() -> None:
    """Only the allocator knows of storage made before the block."""
    held = [block()]
    with track_peak() as peak:
        held.clear()
        again = block()
    assert peak.bytes < 4096
    del again


def test_operators_that_allocate_without_pytorch_objects() -> None:
    """oneDNN allocates raw memory with its address as context."""
    x, weight = torch.randn(48, 64, dtype=torch.bfloat16), torch.randn(96, 64, dtype=torch.bfloat16)
    with track_peak() as peak:
        torch.nn.functional.linear(x, weight)
    assert peak.bytes >= 48 * 96 * 2
    assert torch.empty(0).numel() == 0


def test_threads_and_compiled_code() -> None:
    """The backward of a compiled function runs in a separate thread; both sources see it all."""
    weight = torch.randn(64, 64, requires_grad=True)
    run = torch.compile(lambda x: (x @ weight).sin().square().sum(), backend="aot_eager")
    x = torch.randn(256, 64)
    run(x).backward()
    measured = []
    for source in SOURCES:
        weight.grad = None
        with track_peak(source=source) as peak:
            run(x).backward()
        measured.append(peak.bytes)
    assert measured[0] == measured[1]
    assert measured[0] >= 2 * x.numel() * 4


@pytest.mark.parametrize("asked", [{"device": "meta"}, {"device": "cuda", "curve": True}, {"source": "cuda"}])
def test_refusals(asked: dict[str, object]) -> None:
    with pytest.raises(treefx.UnsupportedError), track_peak(**asked):  # type: ignore[arg-type]
        pass
