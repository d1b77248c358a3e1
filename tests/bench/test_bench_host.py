"""What launches cost the host: every kind is timed, in layers that are the first of their forest and in others."""

import pytest

pytest.importorskip("triton")

from treefx.bench.attention import host


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_LAYERS", 3)
    monkeypatch.setattr(host, "_FORESTS", 2)
    records = list(host.run())
    assert [record["kind"] for record in records] == [*host.KINDS]
    for record in records:
        assert 4 <= record["kernels"] <= 7
        assert min(record[name] for name in record if name.endswith("ward_ms")) > 0
