"""Ways to run one training step; all answer to the same protocol."""
