"""Tree attention on the CPU."""
