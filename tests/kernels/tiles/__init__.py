"""Which tiles exist."""
