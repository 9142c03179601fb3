"""`python -m make_docs`: write every generated file into docs/ and print the names of those that changed."""

from __future__ import annotations

import sys

from make_docs.pages import DOCS, PAGES


def main() -> None:
    for name, generate in PAGES.items():
        path, text = DOCS / name, generate()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")


if __name__ == "__main__":
    main()
