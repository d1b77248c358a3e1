"""Check every architecture through treefx and eager: packed, expanded, errors.

In: ``zoo.json``. Out: the table of ``treefx doctor --zoo`` and the page ``docs/models.md``. A new architecture is a
line of ``zoo.json``.
"""
