"""Passes that rewrite the graph."""
