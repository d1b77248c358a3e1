"""Where people train: each trainer with a compiled model against the same trainer with the model as it is."""
