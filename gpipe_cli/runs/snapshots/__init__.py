"""A saved training state on disk: written whole or not at all, verified before use, free of code.

From the disk upwards: `durable` (files that survive a power cut), `manifest` (finding and verifying snapshots),
`header` and `tensors` (safetensors), `record` and `contents` (what is saved), `manager` (when to save, and what to
keep). Up to `header`, nothing imports torch.
"""
