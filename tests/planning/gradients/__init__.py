"""Gradients of plans: what acts on them during backward, and what they are added to."""
