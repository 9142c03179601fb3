"""Skip connections that jump straight from the partition that stashes to the one that pops."""
