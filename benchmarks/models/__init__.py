"""Models that others wrote, traced and compared with the originals to the bit; see `__main__`."""
