"""Forests over ranks, in one process and in several."""
