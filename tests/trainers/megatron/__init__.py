"""Megatron-Core on distinct tokens."""
