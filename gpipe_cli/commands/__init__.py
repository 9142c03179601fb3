"""One file per command of `gpipe --help`, and the loop over the jobs of a sweep."""
