"""Attention to listed keys on a device: numbers in the interpreter, and compilation ahead of time."""
