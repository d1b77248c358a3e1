"""A dictionary with a bound."""

from treefx.kernels.memory import Bounded


def test_the_entries_set_last_stay() -> None:
    kept: Bounded[str, int] = Bounded(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        kept[key] = value
    assert dict(kept) == {"a": 3, "c": 4} and "b" not in kept and kept.get("b") is None
