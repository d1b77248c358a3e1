"""Tests of treefx; the oracle they share is `tests.oracle`."""
