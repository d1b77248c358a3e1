"""Generated kernels: their text, their choice, in Triton's interpreter and on a device."""
