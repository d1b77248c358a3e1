"""The forward in Gluon: its text run by hand, its machine code, and who may run it."""
