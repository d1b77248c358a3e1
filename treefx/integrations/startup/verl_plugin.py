"""Hook verl from its entry point ``verl.plugins``, if the environment selects treefx.

``VERL_USE_EXTERNAL_PLUGINS=treefx`` (or a list with it) selects it; verl's default, ``auto``, imports this module
without selecting it.
"""

import os

from treefx.integrations.startup.sitecustomize import VERL_HOOKS, hook_imports

__all__: list[str] = []

if "treefx" in [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").split(",")]:
    hook_imports(VERL_HOOKS)
