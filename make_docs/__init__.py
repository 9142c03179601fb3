"""Generates the parts of docs/ that repeat what the code says: the reference pages and the diagrams.

`python -m make_docs` writes them, and a test compares the committed files with a new result. Every file is a pure
function of the package. Only `python -m make_docs.run_pictures` measures: it draws the pictures of a real run.
"""
