"""Tests of treefx, in the folders of what they test; the oracle they share is `tests.oracle`."""
