"""A saved training state on disk: written whole or not at all, verified before use, free of code.

From the disk upwards: `durable` (files that survive a power cut), `manifest` (finding and verifying snapshots; no torch
up to here), `record` (where training stood), `contents` (reading and writing the files), `manager` (when to save, and
what to keep).
"""
