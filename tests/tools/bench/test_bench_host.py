"""What launches cost the host: every kind is timed, in layers that are the first of their forest and in others."""

import pytest

pytest.importorskip("triton")

from tests.cli.validation import assert_measured
from treefx.tools.bench.attention import host


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_LAYERS", 3)
    monkeypatch.setattr(host, "_FORESTS", 2)
    records = list(host.run())
    assert_measured("host", records)
    assert [record["kind"] for record in records] == [*host.KINDS]
    launched = {
        "a product": 7, "a product, plain, one pass": 4, "a product, plain, two passes": 4,
        "four heads per key head": 8, "window": 7, "ALiBi": 9,
    }  # fmt: skip  # one pass takes two where results have to be the same every time, as in tests
    assert {record["kind"]: record["kernels"] for record in records} == launched
    for record in records:
        assert min(record[name] for name in record if name.endswith("ward_ms")) > 0
