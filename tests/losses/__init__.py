"""Losses and the restoration of their gradients, against separate rows."""
