"""Attention alone, on the CPU and on a device, against the ways in which others compute it."""
