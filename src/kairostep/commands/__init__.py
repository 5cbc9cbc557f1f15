"""One file for each command: its arguments, and a `run` that imports what it needs."""
