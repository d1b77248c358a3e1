"""A compiled model over time: calls, modes, processes."""
