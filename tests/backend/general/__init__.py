"""Graphs without a tree: treefx as a backend for any function, and what a process keeps from call to call."""
