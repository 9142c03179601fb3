"""The HTML report of runs: one file that needs no network and no other file.

The charts are SVG, drawn here rather than by a plotting library: a page has some 100 KB instead of 5 MB, works without
scripts and in print, and keeps a strict content security policy.
"""
