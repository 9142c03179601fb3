"""A run of several processes: the launcher, its ranks, their supervision and how they end."""
