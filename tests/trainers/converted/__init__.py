"""``treefx.convert``: models whose backbone runs on distinct tokens in Python."""
