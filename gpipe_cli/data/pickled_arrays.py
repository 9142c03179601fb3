"""Reads a pickled dict of numbers, texts and arrays of bytes, such as CIFAR's archive for Python, without unpickling.

A pickle is a program, and `pickle.load` calls whatever it names. Here `pickletools` takes it apart into opcodes. Those
that make plain values are followed; a call is kept as its name and arguments, and nothing is imported or called. Every
other opcode, and every name that an array of numpy does not need, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.errors import DataError

RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
"""The call that makes an empty array, whose state is its content, by the names of numpy 1 and 2."""
NAMES = {*RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode"}
"""What an array of numpy names; by `encode`, Python 3 writes bytes that Python 2 can read."""
PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING"),
}
"""Opcodes whose argument is a value."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Refused(Exception):
    """The message says what the pickle has that plain values and arrays do not need."""


@final
@dataclass(frozen=True)
class _Name:
    """The name of a function or class, which is not imported."""

    name: str


@final
@dataclass
class _Call:
    """A call that is not made, and the state that its result gets."""

    name: str
    arguments: Any
    state: Any = None


def read_pickled_dict(content: bytes | bytearray, path: Path) -> dict[str, Any]:
    """path: of the file, for messages."""
    values = _Values()
    try:
        for opcode, argument, _ in genops(content):
            values.follow(opcode.name, argument)
        result = values.result()
    except _Refused as error:
        raise DataError(
            f"{path}: {error}, which numbers and images do not need; it is not the published file, and nothing of it "
            "was run"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: damaged, or not a pickled dict ({error})") from error
    return {
        key.decode("latin-1") if isinstance(key, bytes) else str(key): each for key, each in result.items()
    }


def byte_rows(value: Any) -> Tensor | None:
    """A pickled array of bytes with two dimensions; None if the value is something else."""
    match value:
        case _Call(
            name=str(name),
            state=(
                _,
                (int(rows), int(columns)),
                _Call(name="numpy dtype", arguments=("u1", *_)),
                False,
                data,
            ),
        ) if name in RECONSTRUCT:
            # pickletools decodes the strings of Python 2 as latin-1. A text that is none gets too short.
            content = data.encode("latin-1", "ignore") if isinstance(data, str) else data
            if isinstance(content, bytes) and rows > 0 and len(content) == rows * columns > 0:
                return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(rows, columns)
    return None


@final
class _Values:
    """The values that the opcodes so far have made."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> dict[Any, Any]:
        (value,) = self._stack
        if not isinstance(value, dict):
            raise TypeError(f"it holds a {type(value).__name__}")
        return value

    def follow(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS":
                added = [stack.pop()] if opcode == "APPEND" else self._since_mark()
                stack[-1].extend(added)
            case "SETITEM" | "SETITEMS":
                added = self._last(2) if opcode == "SETITEM" else self._since_mark()
                stack[-1].update(zip(added[::2], added[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(_known_name(" ".join(self._last(2)) if argument is None else argument))
            case "REDUCE":
                stack.append(_result(*self._last(2)))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Call):
                    raise _Refused(f"gives a state to a {type(stack[-1]).__name__}")
                stack[-1].state = state
            case _ if opcode in PLAIN:
                stack.append(argument)
            case _ if opcode in CONSTANTS:
                stack.append(CONSTANTS[opcode])
            case _ if opcode in EMPTY:
                stack.append(EMPTY[opcode]())
            case _ if opcode in TUPLES:
                stack.append(tuple(self._last(TUPLES[opcode])))
            case _:
                raise _Refused(f"uses the opcode {opcode} of pickle")

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("a value is missing")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        taken = self._stack[(start := self._marks.pop()) :]
        del self._stack[start:]
        return taken


def _result(called: Any, arguments: Any) -> Any:
    match called, arguments:
        case _Name("_codecs encode"), (str(text), "latin1"):
            return text.encode("latin-1")
        case _Name(name), tuple():
            return _Call(name, arguments)
    raise _Refused(f"calls a {type(called).__name__}")


def _known_name(name: str) -> _Name:
    if name not in NAMES:
        raise _Refused(f"names {name.replace(' ', '.')}")
    return _Name(name)
