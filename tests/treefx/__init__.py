"""Tests of the forest, its losses and the run time."""
