"""The kernels in Gluon: their text run by hand, their machine code, and who may run them."""
