"""Recurrences and convolutions along a tree."""
