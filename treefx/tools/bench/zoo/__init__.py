"""Every architecture, once through treefx and once through eager: what is packed, what is expanded, how exact it is.

In: ``zoo.json``. Out: the table of ``treefx doctor --zoo``. A new architecture is a line of ``zoo.json``.
"""
