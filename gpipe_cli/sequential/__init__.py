"""Models as sequences of layers that keep the original parameter names."""
