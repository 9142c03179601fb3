"""Measures gpipe beside its peers: one harness, many cases; every figure a ratio measured in one run."""
