"""What layers after the first of a forest launch, and with what."""
