"""Tests of the README and the pages of ``docs/``: limits of length, code blocks, commands, links, the API reference."""
