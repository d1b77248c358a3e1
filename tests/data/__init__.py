"""Trajectories to batches."""
