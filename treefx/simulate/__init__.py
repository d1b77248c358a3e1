"""Simulators."""
