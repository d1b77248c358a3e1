"""What treefx tells about a model."""
