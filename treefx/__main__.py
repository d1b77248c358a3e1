"""``python -m treefx``: the command line."""

from treefx.cli import main

main()
