"""The report page of runs: facts in, one HTML file out that needs no network and no other file.

Drawn here as SVG instead of by a plotting library: a page weighs some 100 KB instead of 5 MB, nothing has to be
installed, it can be read without scripts and printed, and a strict content security policy holds.
"""
