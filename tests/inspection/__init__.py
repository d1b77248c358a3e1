"""Reports of treefx on a model."""
