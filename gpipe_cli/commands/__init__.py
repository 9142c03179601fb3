"""One file per command of `gpipe --help`."""
