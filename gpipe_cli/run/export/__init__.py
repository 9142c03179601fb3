"""The formats of `gpipe export`, one file each: `write(snapshot, out)` returns facts about what it wrote."""
