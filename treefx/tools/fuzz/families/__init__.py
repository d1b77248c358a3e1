"""Catalogue the parts of random programs, a file per family: Python text and needs."""
