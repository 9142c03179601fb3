"""The training loop and what lives at its step boundaries."""
