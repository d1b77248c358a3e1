"""Generated Triton kernels of tree attention. Nothing here imports Triton before a kernel is wanted."""
