"""Ways to divide layers among partitions, one file per method."""
