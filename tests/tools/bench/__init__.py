"""Measurements measure what they say."""
