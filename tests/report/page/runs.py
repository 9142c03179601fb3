"""Run directories for tests of the report page: as gpipe writes them, or as an attacker would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x1b[31m\u202e"


def piece(
    label: str, phase: str, partition: int, begin: float, process: int = 1, step: int = 0
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": partition,
        "name": label,
        "cat": phase,
        "ts": begin,
        "dur": 1000.0,
        "args": {"step": step, "partition": partition, "micro_batch": int(label[-1]), "thread": 7},
    }


def steps(process: int = 1, step: int = 0) -> list[dict[str, Any]]:
    """Two partitions, two micro-batches: six pieces each, and a copy."""
    rows = [("F0", "forward"), ("copy 0", "copy"), ("F1", "forward"), ("R0", "recompute"), ("B0", "backward")]
    rows += [("B1", "backward")]
    return [
        piece(label, phase, partition, 5e6 * step + 1000.0 * (place + partition), process, step)
        for partition in (0, 1)
        for place, (label, phase) in enumerate(rows)
    ]


def layer(name: str, partition: int) -> dict[str, Any]:
    sizes = {"parameters": 10, "parameter_bytes": 40, "saved_bytes": 80}
    return {
        "name": name,
        "type": "Linear",
        "partition": partition,
        "forward_ms": 1.5,
        "backward_ms": 2.5,
        **sizes,
    }


def write_profile(directory: Path, name: str = "conv") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    busy = {"busy": 0.75, "recompute": 0.1, "bubble": 0.25, "waiting_ms": 1.0, "peak_saved_bytes": 160}
    profile = {
        "layers": [layer(name, 0), layer("head", 1)],
        "forward_ms": 3.0,
        "timeline": {
            "bubble": 0.25,
            "ideal_bubble": 0.2,
            "advice": [f"chunks=4 for {name}"],
            "partitions": [{"partition": index, **busy} for index in (0, 1)],
        },
        "command": "gpipe profile timeline=true",
    }
    place = {"device": "cpu", "layers": 1, "first": name, "last": name, "parameters": 10}
    sizes = {"parameter_bytes": 40, "gradient_bytes": 40, "optimizer_bytes": 80}
    launch = {
        "command": "profile",
        "commands": ["gpipe profile timeline=true"],
        "device_memory": 1000,
        "partitions": [{**place, **sizes}] * 2,
    }
    trace = [event for step in range(3) for event in steps(1, step)] + steps(2)
    for file, content in (("profile", profile), ("launch", launch), ("trace", {"traceEvents": trace})):
        (directory / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def write_training(directory: Path, length: int = 20, **summary: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "epoch": 0, "split": "train", "loss": 1 / step, "lr": 0.1, "samples_per_second": 9.5}
        for step in range(1, length + 1)
    ]
    rows.append({"step": length, "epoch": 0, "split": "eval", "loss": 0.5, "top1": 0.75, "seconds": 3.0})
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (directory / "metrics.jsonl").write_text(lines, encoding="utf-8")
    facts = {"loss": 0.5, "top1": 0.75, "steps": length, "command": "gpipe train", **summary}
    (directory / "summary.json").write_text(json.dumps(facts), encoding="utf-8")
    (directory / "config.yaml").write_text(f"chunks: {length}\nmodel:\n  width: 3\n", encoding="utf-8")
    (directory / "env.json").write_text('{"torch": "2.13.0", "devices": ["cpu"]}', encoding="utf-8")
    return directory


def write_check(directory: Path, result: str = "24.0 GB/s") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"name": "links", "verdict": "ok", "result": result, "figures": {}, "to_do": ""},
        {"name": "ranks", "verdict": "problem", "result": result, "figures": {}, "to_do": f"repair {result}"},
        {"name": "races", "verdict": "unheard of", "result": result},
    ]
    check = {"verdict": "problem", "rows": rows, "seconds": 40.0, "command": "gpipe check"}
    (directory / "check.json").write_text(json.dumps(check), encoding="utf-8")
    return directory
