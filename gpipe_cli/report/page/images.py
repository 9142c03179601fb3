"""Small images inside the page: no other file, and nothing but PNG, which a browser cannot run."""

from __future__ import annotations

import base64
import io
import re

PREFIX = "data:image/png;base64,"
MAX_URI = 2**17
"""Characters; an image of 96 x 96 random pixels has a third of that."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def png_uri(pixels: bytes, width: int, height: int) -> str:
    """The address of an image; pixels: red, green and blue, row by row."""
    from PIL import Image  # not needed to read a page's data

    content = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(content, "PNG", optimize=True)
    return PREFIX + base64.b64encode(content.getvalue()).decode()


def as_png_uri(value: object) -> str:
    """The address if it is one that `png_uri` could have made, else an empty text."""
    if not isinstance(value, str) or len(value) > MAX_URI or not value.startswith(PREFIX):
        return ""
    return value if BASE64.fullmatch(value, len(PREFIX)) else ""
