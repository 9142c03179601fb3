"""Times of layers that were measured before, kept in files so that a run need not measure them again.

    profiles = ProfileCache(default_folder())
    layers = profiles.times(module, sample, seconds=3.0)
    profiles.origin                     # where they come from, in words

One JSON file per fingerprint, put in place whole. A file is data from outside: whatever does not fit to the letter is
left alone and said, and the layers are measured. A folder that cannot be written costs the cache, not the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.fingerprint import fingerprint
from gpipe_cli.profiling.layers import Sample, profile_layers

__all__ = ["LayerTimes", "ProfileCache", "default_folder"]

FORMAT = 1
LARGEST = 2**24
"""Bytes; ten thousand layers take one."""


@final
@dataclass(frozen=True)
class LayerTimes:
    forward_ms: float
    backward_ms: float


def default_folder() -> Path:
    """In the user's own cache; the XDG specification says to ignore a relative path."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (named if named.is_absolute() else Path.home() / ".cache") / "gpipe" / "profiles"


@final
class ProfileCache:
    def __init__(
        self, folder: Path | None, *, reuse: bool = True, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Without a folder nothing is kept; without `reuse` every time is measured anew, and kept."""
        self._folder, self._reuse, self._say = folder, reuse, say
        self.origin = ""

    def times(self, module: nn.Sequential, sample: Sample, seconds: float) -> list[LayerTimes]:
        """Of each layer, measured for `seconds` now, or for as long or longer before."""
        key = fingerprint(module, sample)
        path = None if self._folder is None else self._folder / f"{_digest(key)}.json"
        has_storage = not any(parameter.is_meta for parameter in module.parameters())
        if path is not None and (self._reuse or not has_storage):
            known = self._read(path, key, seconds)
            if known is not None:
                return known
        if not has_storage:
            raise ConfigError(
                "balance=time: nothing is run here, and no measurement of this model with these settings is kept; "
                "`gpipe balance --by time` makes one and prints the line to paste, balance=params needs none"
            )
        began = time.perf_counter()
        layers = [
            LayerTimes(one.forward_ms, one.backward_ms)
            for one in profile_layers(module, sample, seconds=seconds)
        ]
        self.origin = f"layers measured in {time.perf_counter() - began:.1f} s"
        if path is not None:
            self._write(path, key, seconds, layers)
        return layers

    def _read(self, path: Path, key: Mapping[str, Any], seconds: float) -> list[LayerTimes] | None:
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"it is larger than {LARGEST} bytes")
            document = json.loads(path.read_text(encoding="utf-8"))
            layers, measured = _checked(document, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._say(f"{path} is no measurement and is ignored: {error}")
            return None
        if document["seconds"] < seconds:
            return None
        self.origin = f"layer times of {measured} reused; balance.cache=false measures them anew"
        return layers

    def _write(
        self, path: Path, key: Mapping[str, Any], seconds: float, layers: Sequence[LayerTimes]
    ) -> None:
        document = {
            "format": FORMAT,
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": seconds,
            "key": key,
            "layers": [[one.forward_ms, one.backward_ms] for one in layers],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another run may read or write the same file now: it sees the old one or the new one, whole.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
                json.dump(document, file)
            Path(file.name).replace(path)
        except OSError as error:
            self._say(f"the layer times cannot be kept for the next run: {error}")


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _checked(document: Any, key: Mapping[str, Any]) -> tuple[list[LayerTimes], str]:
    """The times and when they were measured; ValueError for whatever this file would not have written."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("key") != key:
        raise ValueError("it is of another format or of another model")
    seconds, measured, layers = (document.get(name) for name in ("seconds", "measured", "layers"))
    if not _is_time(seconds) or not isinstance(measured, str) or len(measured) > 40:
        raise ValueError("it does not say when and how long was measured")
    if not isinstance(layers, list) or len(layers) != key["layers"]:
        raise ValueError(f"it does not have {key['layers']} layers")
    for pair in layers:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_time, pair)):
            raise ValueError(f"{str(pair)[:40]} are no times")
    return [LayerTimes(float(there), float(back)) for there, back in layers], measured


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
