"""Generates the parts of docs/ that follow from the code: the reference pages and the pictures of schedules.

`python -m make_docs` writes them, and a test compares the committed files with generated ones. Each is a pure function
of the package: nothing is measured, so the same code gives the same bytes on any machine.
"""
