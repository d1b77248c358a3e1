"""The entry point ``verl.plugins``, which verl imports in every process: it hooks verl where it is asked for by name.

``VERL_USE_EXTERNAL_PLUGINS=treefx`` (or a list with it) asks; verl's default, ``auto``, imports this and does not.
"""

import os

from treefx.integrations.startup.sitecustomize import VERL_HOOKS, hook_imports

__all__: list[str] = []

if "treefx" in [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").split(",")]:
    hook_imports(VERL_HOOKS)
