"""Trainers: each with a compiled model against the same with the plain model."""
