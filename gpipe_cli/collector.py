"""Python's collector of cycles, held back while a command and all that it needs are imported.

Importing makes hundreds of thousands of objects that stay, and the collector looks through all of them again and
again for what is garbage. Afterwards it need not look at those any more either, which shortens each of its rounds.
Only for a process that is gpipe's own: whoever calls `main` from Python keeps the collector as it is.
"""

from __future__ import annotations

import gc

__all__ = ["hold_back", "release"]


def hold_back() -> None:
    gc.disable()


def release() -> None:
    """What is there by now is there to stay; nothing, where the collector was not held back."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
