"""A saved training state on disk: written whole or not at all, verified before use, free of code.

From the disk upwards: `durable` (files that survive a power cut), `manifest` (what belongs to a snapshot, and
verification), `discovery` (the snapshots of a run), `header` and `tensors` (safetensors), `record` and `contents` (what
is saved), `retention` and `manager` (when to save, and what to keep). Up to `header`, nothing imports torch.
"""
