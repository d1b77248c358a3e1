"""What worker processes share: everything that takes long to import and starts no threads."""

import gc

import treefx.inspection.inspector
import treefx.runtime.compiled_graph  # noqa: F401

gc.collect()
gc.freeze()  # imported modules stay, and need no garbage collection
