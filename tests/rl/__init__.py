"""Advantages and rollouts."""
