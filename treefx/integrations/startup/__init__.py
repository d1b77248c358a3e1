"""Hook every Python process of a command: ``treefx run`` puts this folder on its path.

Python imports ``sitecustomize`` from it whenever it starts, however a process is spawned. Processes that ignore
``PYTHONPATH`` (``python -E``, ``-I``) are not hooked.
"""
