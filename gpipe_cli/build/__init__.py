"""From settings to loaders, models, partitions, optimizers and engines."""
