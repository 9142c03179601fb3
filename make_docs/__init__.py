"""Makes the parts of docs/ that say what the code says: the reference pages and the pictures of schedules.

`python -m make_docs` writes them; a test holds what is committed against what is made. Every page is a pure function of
the package: nothing is measured, and the same code gives the same bytes on any machine.
"""
