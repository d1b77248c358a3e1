"""What worker processes share: everything that takes long to import and starts no threads."""

import treefx.fuzz.truth
import treefx.inspector
import treefx.runtime  # noqa: F401
