"""What all threads are doing right now, for a step that never ends."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["print_stacks"]


def print_stacks() -> None:
    """Print the stack of every thread to stderr, as they are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        sys.stderr.write(f"Thread {names.get(identity, identity)}:\n{stack}\n")
    sys.stderr.flush()
