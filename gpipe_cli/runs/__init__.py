"""The life of a training run: its directory, snapshots, resuming, records and results."""
