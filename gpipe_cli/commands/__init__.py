"""One file per command: wiring only, read from top to bottom."""
