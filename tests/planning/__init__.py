"""Exactness of the backend, from whole models down to single inputs."""
