"""What worker processes share: everything that takes long to import and starts no threads."""

import treefx.fuzz.truth
import treefx.inspection.inspector
import treefx.runtime.compiled_graph  # noqa: F401
