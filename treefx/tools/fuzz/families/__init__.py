"""What random programs are made of, a file per family: each part is a piece of Python text and what it needs."""
