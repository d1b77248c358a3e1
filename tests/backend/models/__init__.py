"""What a model may be: spellings of attention, mixers, experts, architectures."""
