"""Small images inside the page: no other file, and nothing but PNG, which a browser cannot run."""

from __future__ import annotations

import base64
import re
import struct
import zlib

PREFIX = "data:image/png;base64,"
MAX_URI = 2**17
"""Characters; an image of 96 x 96 random pixels has a third of that."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def png_uri(pixels: bytes, width: int, height: int) -> str:
    """The address of an image; pixels: red, green and blue, row by row."""
    row = 3 * width
    assert len(pixels) == row * height
    # A filter type, 0 for none, precedes each row.
    rows = b"".join(b"\0" + pixels[begin : begin + row] for begin in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)
    return PREFIX + base64.b64encode(content).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def as_png_uri(value: object) -> str:
    """The address if it is one that `png_uri` could have made, else an empty text."""
    if not isinstance(value, str) or len(value) > MAX_URI or not value.startswith(PREFIX):
        return ""
    return value if BASE64.fullmatch(value, len(PREFIX)) else ""
