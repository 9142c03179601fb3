"""Models larger than their device: kept elsewhere, and brought in slice by slice."""
