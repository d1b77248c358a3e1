"""A folder for Python's path: Python imports ``sitecustomize`` from it whenever it starts, so ``treefx run`` reaches
every Python process of a command, however it is spawned, but those that ignore ``PYTHONPATH`` (``python -E``, ``-I``).
"""
