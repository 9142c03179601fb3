"""A saved training state on disk: written whole or not at all, verified before use, no code in it.

From the disk upwards: `durable` (files and directories that survive a power cut), `manifest` (what belongs to a
snapshot, with digests), `reading` (verify, then use what was verified), `finding` (the newest valid one),
`tensors` (safetensors), `record` (where training stood), `background` and `keeper` (when to save, what to keep).
Everything up to `finding` does without torch.
"""
