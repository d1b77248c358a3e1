"""Proofs that values stay causal: fills, choices, mixers."""
