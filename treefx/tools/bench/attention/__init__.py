"""Measure attention alone, on the CPU and on a device, against its rivals."""
