"""Run directories somebody prepared: every file of one replaced by something else, against every command that reads it.

A command ends with what it would have found in an untouched run, or with one line and the right exit code; it waits
for nothing, and no file outside of the run directory changes. Whoever can write a file can write its digest too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from gpipe_cli.runs.snapshots import manifest
from gpipe_cli.runs.snapshots.durable import FileDigest
from gpipe_cli.tensor_files.tensor_file import decode, encode
from tests.support.command_line import Answer, Gpipe
from tests.support.trained_runs import TrainedRun

Change = Callable[[Path], object]
ALLOW = "allow=[tiny_for_tests]"
SNAPSHOT = "snapshots/step-00000006"
COMMANDS = {
    "resume": ("train", "resume=run", ALLOW, "steps=8"),
    "eval": ("eval", "run=run", ALLOW, "threads=1"),
    "export": ("export", "run=run", "out=out.safetensors"),
    "report": ("report", "run"),
}
UNHARMED: list[list[bytes]] = []
"""The bits of the run, resumed as it is: trained once."""


class Hold(Protocol):
    """Changes a fresh run, then gives the command: what is promised of all of them."""

    def __call__(self, change: Change, command: str, codes: tuple[int, ...] = ...) -> Answer: ...


def bits(run: Path) -> list[bytes]:
    newest = max((run / "snapshots").glob("step-????????"))
    return [(newest / name).read_bytes() for name in (manifest.MODEL, manifest.OPTIMIZER)]


def seal(run: Path, change: Callable[[dict[str, Any]], object] = lambda record: None) -> None:
    """Rewrite the manifest with the digests of the present files."""
    folder = run / SNAPSHOT
    record = json.loads((folder / manifest.MANIFEST).read_text())["record"]
    change(record)
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    facts = {
        name: FileDigest(len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    }
    (folder / manifest.MANIFEST).write_bytes(manifest.encode(manifest.Manifest(facts, record)))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def linked(name: str, run: Path) -> None:
    target = {"snapshots": "snapshots", SNAPSHOT: SNAPSHOT}.get(name, "file")
    remove(run / name)
    (run / name).symlink_to(run.parent / "victim" / target)


def linked_to_nowhere(name: str, run: Path) -> None:
    remove(run / name)
    (run / name).symlink_to(run.parent / "victim" / "new")


def hard_linked(name: str, run: Path) -> None:
    remove(run / name)
    (run / name).hardlink_to(run.parent / "victim" / "file")


def named_pipe(name: str, run: Path) -> None:
    remove(run / name)
    os.mkfifo(run / name)


def device(name: str, run: Path) -> None:
    remove(run / name)
    (run / name).symlink_to("/dev/zero")


def directory(name: str, run: Path) -> None:
    remove(run / name)
    (run / name).mkdir()
    (run / name / "file").touch()


def huge(name: str, run: Path) -> None:
    if (run / name).is_dir():
        remove(run / name)
    with (run / name).open("ab") as file:
        file.truncate(2**40)


def filled(content: bytes, name: str, run: Path) -> None:
    remove(run / name)
    (run / name).write_bytes(content)


def flipped(seed: int, name: str, run: Path) -> None:
    chance = random.Random(seed)
    content = bytearray((run / name).read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    (run / name).write_bytes(content)


@pytest.fixture
def hold(tiny: Gpipe, trained_run: TrainedRun, tmp_path: Path) -> Hold:
    def fresh() -> Path:
        remove(tmp_path / "run")
        return trained_run("tiny")

    if not UNHARMED:
        run = fresh()
        assert tiny(*COMMANDS["resume"]).code == 0
        UNHARMED.append(bits(run))
    victim, out = tmp_path / "victim", tmp_path / "out.safetensors"

    def run_changed(change: Change, command: str, codes: tuple[int, ...] = (0, 2, 3, 4, 6)) -> Answer:
        run = fresh()
        saved = (run / SNAPSHOT / manifest.MODEL).read_bytes()
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(run / "snapshots", victim / "snapshots")
        (victim / "file").write_text("precious\n")
        for path in (out, out.with_suffix(".json")):
            path.unlink(missing_ok=True)
        change(run)
        before = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
        answer = tiny(*COMMANDS[command])
        assert {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()} == before
        assert answer.code in codes, answer.err
        assert "Traceback" not in answer.err
        if answer.code:
            assert answer.err.splitlines()[-1].startswith("gpipe: error: ") and "--debug" not in answer.err
        elif command == "resume":
            assert bits(run) == UNHARMED[0]
        elif command == "export":
            # The same tensors; the header also describes the inputs.
            assert encoded(out.read_bytes()) == encoded(saved)
        return answer

    return run_changed


def encoded(content: bytes) -> bytes:
    """A file of weights without what its header says besides the tensors."""
    return b"".join(encode(decode(bytearray(content))))


@pytest.mark.parametrize(
    ("kind", "name", "command", "says"),
    [
        (linked, "metrics.jsonl", "resume", "metrics.jsonl: is a symbolic link, not a regular file"),
        (linked, "train.log", "resume", "train.log: is a symbolic link"),
        (linked, "snapshots", "resume", "run/snapshots: cannot be read: 'snapshots' is a symbolic link"),
        (named_pipe, "run.lock", "resume", "run.lock: is a named pipe"),
        (named_pipe, "launch.json", "resume", "launch.json: cannot be read: is a named pipe"),
        (partial(filled, b'{"commands": ["\'"]}'), "launch.json", "resume", "No closing quotation"),
        (
            named_pipe,
            f"{SNAPSHOT}/{manifest.MANIFEST}",
            "export",
            "manifest.json: cannot be read: is a named pipe",
        ),
        (device, f"{SNAPSHOT}/{manifest.MODEL}", "export", "is a symbolic link"),
    ],
)
def test_anything_but_a_regular_file_in_a_run_is_refused_at_once(
    hold: Hold, kind: Callable[[str, Path], None], name: str, command: str, says: str
) -> None:
    """Links were followed: other files were emptied, other runs' snapshots deleted. Pipes were waited for."""
    assert says in hold(partial(kind, name), command, codes=(4,)).err


def test_a_report_skips_irregular_files_and_replaces_no_other_file(hold: Hold) -> None:
    answer = hold(partial(named_pipe, "metrics.jsonl"), "report", codes=(0,))
    assert "metrics.jsonl: cannot be read: is a named pipe" in answer.err
    answer = hold(partial(named_pipe, "report.html"), "report", codes=(2,))
    assert "report.html: is a named pipe, not a regular file; give another name" in answer.err


def test_replacing_a_hard_linked_file_does_not_change_its_other_name(hold: Hold) -> None:
    def change(run: Path) -> None:
        for name in ("summary.json", "summary.json.tmp", "launch.json.tmp", "snapshots/step-00000008.tmp"):
            linked(name, run)

    hold(change, "resume", codes=(0,))


def test_a_run_directory_may_itself_be_a_link(hold: Hold, tmp_path: Path) -> None:
    def moved(run: Path) -> None:
        run.rename(tmp_path / "scratch")
        run.symlink_to(tmp_path / "scratch")

    hold(moved, "resume", codes=(0,))


HOSTILE_SETTINGS = [
    ("tiny_for_tests.build", "os.mkdir\n  path: canary"),
    ("model:", "model: !!python/object/apply:os.mkdir [canary]\nmodle:"),
    ("model:", "- a\n- list\nmodel:"),
    ("model:", "\x00"),
    ("model:", "a: [1\nmodel:"),
    ("precision: fp32", "precision: {}"),
]


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_hostile_settings_of_a_run_execute_nothing(hold: Hold, tmp_path: Path, command: str) -> None:
    for innocent, evil in HOSTILE_SETTINGS:

        def change(run: Path, innocent: str = innocent, evil: str = evil) -> None:
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace(innocent, evil, 1))

        assert hold(change, command, codes=(2, 4)).err.count("\n") == 1, evil
        assert not (tmp_path / "canary").exists()


def test_a_key_that_the_settings_of_a_run_lack_has_its_default(hold: Hold) -> None:
    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert "\ndeterministic: false\n" in text
        (run / "config.yaml").write_text(text.replace("\ndeterministic: false\n", "\n"))

    hold(change, "resume", codes=(0,))


def without(name: str, run: Path) -> None:
    (run / SNAPSHOT / name).unlink()
    seal(run)


def test_weights_that_the_manifest_does_not_list_are_reported_as_damage(hold: Hold) -> None:
    """`export` ended in a KeyError."""
    answer = hold(partial(without, manifest.MODEL), "export", codes=(4,))
    assert "manifest.json: damaged: it does not list model.safetensors" in answer.err


def test_a_missing_optimizer_state_is_an_error_without_reset_optimizer(
    tiny: Gpipe, hold: Hold, tmp_path: Path
) -> None:
    """A run whose snapshot listed no such file went on with a new optimizer, in silence."""
    change = partial(without, manifest.OPTIMIZER)
    answer = hold(change, "resume", codes=(4,))
    assert (
        "does not fit the optimizer: it has no 'exp_avg'" in answer.err
        and "reset_optimizer=true" in answer.err
    )
    answer = tiny(*COMMANDS["resume"], "reset_optimizer=true")
    assert answer.code == 0 and "with a new optimizer state" in answer.err
    lost = tmp_path / "run" / "snapshots" / "step-00000008" / manifest.OPTIMIZER
    lost.unlink()
    assert tiny("train", "resume=run", ALLOW, "steps=9").code == 4
    assert tiny("train", "resume=run", ALLOW, "steps=9", "reset_optimizer=true").code == 0
    assert tiny("train", "resume=run", ALLOW, "steps=10").code == 0, (
        "asked for once, it is not asked for ever after"
    )
    answer = tiny("train", "reset_optimizer=true")
    assert answer.code == 2 and "reset_optimizer=true: needs resume=" in answer.err


def with_header(file: str, change: Callable[[Any], object], run: Path) -> None:
    path = run / SNAPSHOT / file
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    seal(run)


def test_a_file_with_an_invalid_header_is_not_exported(hold: Hold) -> None:
    def lying(header: Any) -> None:
        header["0.bias"]["shape"] = [5]

    for change in (lying, lambda header: [1], lambda header: {**header, "__metadata__": 3}):
        answer = hold(partial(with_header, manifest.MODEL, change), "export", codes=(4,))
        assert "model.safetensors: damaged: " in answer.err


def test_a_relabeled_tensor_is_refused(hold: Hold) -> None:
    def relabel(header: Any) -> None:
        header["0.weight"]["dtype"] = "I32"

    answer = hold(partial(with_header, manifest.MODEL, relabel), "eval", codes=(4,))
    assert "does not fit the model: tensor 0.weight is 4x3x3x3 of int32" in answer.err


FILES = (
    "config.yaml",
    "paths.json",
    "overrides.yaml",
    "env.json",
    "train.log",
    "metrics.jsonl",
    "summary.json",
    "inference.json",
    "launch.json",
    "report.html",
    SNAPSHOT,
    *(f"{SNAPSHOT}/{name}" for name in (manifest.MANIFEST, manifest.MODEL, manifest.OPTIMIZER)),
)
NAMES = (
    "run.lock",
    "trace.json",
    "snapshots",
    "snapshots/step-00000008",
    "snapshots/step-00000006.tmp",
    "launch.json.tmp",
)
CONTENTS = (
    b"",
    b'{"step": 1e999, "split": "train", "commands": [1e999], "loss": 1e999}\n',
    b'{"step": NaN, "split": [], "commands": [{}], "loss": "abc", "seconds": ' + b"9" * 400 + b"}\n",
    b"\xff\xfe\0abc\n",
)
KINDS = (linked, linked_to_nowhere, hard_linked, named_pipe, device, directory, huge)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*FILES, *NAMES])
def test_any_content_of_any_file_gives_the_same_bits_or_one_line(hold: Hold, name: str) -> None:
    changes = [partial(kind, name) for kind in KINDS]
    if name in FILES and name != SNAPSHOT:
        changes += [partial(filled, content, name) for content in CONTENTS]
        changes += [partial(flipped, seed, name) for seed in range(4)]
    for change in changes:
        for command in COMMANDS:
            hold(change, command)


VALUES = (None, True, -1, 10**400, 2**70, 1e308, -1e300, float("nan"), "x", [], {}, [[]], {"a": 1})


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in nested mappings and lists."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def with_value(path: tuple[Any, ...], value: Any, record: dict[str, Any]) -> None:
    node: Any = record
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = copy.deepcopy(value)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_value_in_a_record_gives_the_same_bits_or_one_line(hold: Hold, tiny_run: Path) -> None:
    record = json.loads((tiny_run / SNAPSHOT / manifest.MANIFEST).read_text())["record"]
    for path in leaves(record):
        for value in VALUES:
            message = path[0] in ("versions", "threads", "best", "epoch", "batch")  # these decide no bit
            if not (message and value == "x"):
                hold(partial(seal, change=partial(with_value, path, value)), "resume")


def with_tensors(file: str, change: Callable[[dict[str, Tensor]], object], run: Path) -> None:
    path = run / SNAPSHOT / file
    tensors = {name: tensor.clone() for name, tensor in decode(bytearray(path.read_bytes())).items()}
    change(tensors)
    path.write_bytes(b"".join(bytes(piece) for piece in encode(tensors)))
    seal(run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", [manifest.MODEL, manifest.OPTIMIZER])
def test_any_tensors_give_the_same_bits_or_one_line(hold: Hold, tiny_run: Path, file: str) -> None:
    whole = decode(bytearray((tiny_run / SNAPSHOT / file).read_bytes()))
    matrix = next(name for name, tensor in whole.items() if tensor.dim() == 2)

    def put(change: Callable[[Tensor], Tensor], tensors: dict[str, Tensor]) -> None:
        tensors[matrix] = change(tensors[matrix])

    changes: list[Callable[[dict[str, Tensor]], object]] = [
        partial(put, change)
        for change in (
            lambda tensor: tensor.t().contiguous(),
            lambda tensor: tensor.flatten(),
            lambda tensor: tensor.half(),
            lambda tensor: tensor.double(),
            lambda tensor: tensor.view(torch.int32),
            lambda tensor: tensor[:1].clone(),
            lambda tensor: tensor[:0].clone(),
            lambda tensor: tensor[0, 0].clone(),
        )
    ]
    changes += [
        lambda tensors: tensors.clear(),
        lambda tensors: tensors.pop(matrix),
        lambda tensors: tensors.update({"extra": torch.ones(2)}),
        lambda tensors: tensors.update({f"{matrix}x": tensors.pop(matrix)}),
        lambda tensors: tensors.update({"a/b/c": tensors.pop(matrix)}),
    ]
    for change in changes:
        hold(partial(with_tensors, file, change), "resume", codes=(4,))
