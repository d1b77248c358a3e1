"""Generate Triton kernels of tree attention; import Triton only for a kernel."""
