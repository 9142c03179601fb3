"""Texts with labels, and rows of every format: the same samples, bad ones named, nothing fetched or followed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, hold_out
from gpipe_cli.data.texts import build_rows
from gpipe_cli.errors import ConfigError, DataError, GpipeError
from tests.support.tokenizers import save_tokenizer

TEXTS = ["shall I", "compare thee", "to a day", "thee", "I", "summer"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def labeled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": TEXTS[place % 6], "label": label} for place, label in enumerate(labels)]


def build(path: str, **keys: Any) -> Data:
    return build_rows(path, **{"label": "label", "context": 8, **keys})


def targets(samples: Any) -> list[int]:
    found: Tensor = samples.targets
    return found.tolist()


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("no", "yes", "maybe", "no"), ("maybe", "no", "yes")),
        ((0, 2, 1, 0), ("0", "1", "2")),
        ((10, 9, 10), ("9", "10")),
    ],
)
def test_classes_are_the_labels_in_order(
    tmp_path: Path, labels: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    data = build(write(tmp_path / "a", labeled(*labels)))
    assert data.class_names == names and data.classes == len(names) and data.test is None
    assert [names[target] for target in targets(data.train)] == [str(label) for label in labels]


def test_each_class_is_held_out_in_proportion(tmp_path: Path) -> None:
    """A file that is sorted by class had one class at its end, and no other was held out."""
    data = build(write(tmp_path / "a", labeled(*["a"] * 10, *["b"] * 10)))
    divided = hold_out(data, 0.2, seed=0)
    assert sorted(targets(divided.data.test)) == [0, 0, 1, 1]
    assert divided.note is not None and "overlap" not in divided.note


def test_a_text_that_is_cut_keeps_the_tokens_that_end_every_text(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", bos=True, eos_token="<|endoftext|>")
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 3), ("<|im_end|>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    data = build(write(tmp_path / "a", labeled("a", "b", "a")), tokenizer=str(folder), context=3)
    input, _ = data.train.batch(torch.arange(3))  # type: ignore[union-attr]
    whole = tokenizer.encode(TEXTS[1]).ids
    assert len(whole) > 3 and input["input_ids"][1].tolist() == [3, whole[1], 2]
    assert input["attention_mask"].all() and "samples are longer and were cut" in data.notes[0]
    with pytest.raises(ConfigError, match=r"data\.context=2: the tokenizer itself adds 2 tokens; give more"):
        build(str(tmp_path / "a"), tokenizer=str(folder), context=2)


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([{"text": "a"}], {}, r"a: line 1: has no field 'label'; set data\.label to one of: text"),
        ([{"text": "a", "label": None}], {}, "line 1: the label is a NoneType; it must be a text or a whole"),
        ([{"text": "a", "label": True}], {}, "line 1: the label is a bool"),
        ([{"text": "a", "label": -1}], {}, "line 1: the label is -1, which means that there is none"),
        ([{"text": "a", "label": ""}], {}, "line 1: the label has 0 characters"),
        ([{"text": ["a"], "label": 1}], {}, "line 1: the text is a list; with data.label it must be a text"),
        ([{"text": "", "label": 1}], {}, "line 1: the text has no tokens; remove the row"),
        (labeled("a", "a", "a"), {}, "every text has the label a, so there is nothing to learn"),
        (
            labeled("a", "b", "c"),
            {"held_out": 0.3},
            "text 3 has the label c, which the training texts do not have: a, b",
        ),
        (
            labeled("a", "b"),
            {"labels": ["b", "c"]},
            r"text 1 has the label a, which data\.labels do not have: b, c",
        ),
        (
            labeled("a", "b"),
            {"label": None, "labels": ["b"]},
            r"data\.labels: has no effect without data\.label",
        ),
        (
            labeled("a", "b"),
            {"pack": "joined"},
            r"data\.pack=joined: has no effect on texts with data\.label",
        ),
        (labeled("a", "b"), {"label": 3}, r"data\.label=3: must be the name of a field"),
        (labeled("a", "b"), {"held_out": 0.1, "test": "x"}, r"data\.held_out=0.1 has no effect; remove one"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, rows: list[dict[str, Any]], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(GpipeError, match=message) as caught:
        build(write(tmp_path / "a", rows), **keys)
    assert "\n" not in str(caught.value)


def test_a_file_of_its_own_is_evaluated_on(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a", labeled("b", "a", "b")), write(tmp_path / "b", labeled("a", "b"))
    data = build(train, test=test)
    assert (targets(data.train), targets(data.test)) == ([1, 0, 1], [0, 1])
    unknown = write(tmp_path / "c", labeled("a", "z"))
    with pytest.raises(DataError, match="text 5 has the label z, which the training texts do not have: a, b"):
        build(train, test=unknown)
    for pack in (True, False):
        texts = build_rows(train, test=test, context=4, pack=pack)
        alone = build_rows(test, test=test, context=4, pack=pack)
        for mine, theirs in zip(texts.test[0], alone.test[0], strict=True):  # type: ignore[index]
            assert str(mine) == str(theirs)


def save_rows(directory: Path, rows: list[dict[str, Any]], names: list[str] | None = None) -> Path:
    """As `save_to_disk` of datasets writes them."""
    arrow = pytest.importorskip("pyarrow")
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()} if names else None
    table = arrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
    directory.mkdir(parents=True)
    files = []
    for shard, begin in enumerate(range(0, len(rows), 3)):
        files.append({"filename": f"data-{shard:05d}-of-00002.arrow"})
        with arrow.ipc.new_stream(str(directory / files[-1]["filename"]), table.schema) as stream:
            stream.write_table(table.slice(begin, 3))
    (directory / "state.json").write_text(json.dumps({"_data_files": files}))
    return directory


def test_every_format_has_the_same_samples(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = ["no", "yes"]
    rows = labeled("yes", "no", "yes", "no", "no")
    numbers = [{**row, "label": names.index(row["label"])} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    paths = [
        write(tmp_path / "a", rows),
        tmp_path / "a.parquet",
        save_rows(tmp_path / "saved", numbers, names),
    ]
    expected, *others = (build(str(path)) for path in paths)
    for data in others:
        assert data.class_names == ("no", "yes") and len(data.train) == 5
        for index in range(5):
            assert str(data.train[index]) == str(expected.train[index])


def test_a_split_is_evaluated_on(tmp_path: Path) -> None:
    for split, labels in (("train", "aba"), ("test", "b"), ("validation", "ab")):
        save_rows(tmp_path / "saved" / split, labeled(*labels))
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    data = build(str(tmp_path / "saved"))
    assert (targets(data.train), targets(data.test)) == ([0, 1, 0], [0, 1])
    data = build(str(tmp_path / "saved"), test=str(tmp_path / "saved/test"))
    assert targets(data.test) == [1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"_data_files": [{"filename": "../secret.arrow"}]},
            "names '../secret.arrow', which is not an .arrow file",
        ),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "names '/etc/passwd', which is not an .arrow file"),
        ({"_data_files": [{"filename": "link.arrow"}]}, "cannot be read: is a symbolic link"),
        ({"_data_files": [{"filename": "broken.arrow"}]}, "broken.arrow: is damaged"),
        ({"_data_files": [{"filename": "empty.arrow"}]}, "is empty"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot be read: No such file"),
        ({"_data_files": []}, "has no rows, or only an index of rows"),
        ({"_data_files": 3}, "state.json is damaged"),
        ([], "state.json is damaged"),
        (None, "has no state.json; give a file, a pattern, or a directory that save_to_disk wrote"),
    ],
)
def test_a_hostile_directory_is_refused(tmp_path: Path, state: Any, message: str) -> None:
    pytest.importorskip("pyarrow")
    save_rows(tmp_path / "other", labeled("a", "b"))
    target = tmp_path / "saved"
    target.mkdir()
    (target / "link.arrow").symlink_to(tmp_path / "other/data-00000-of-00002.arrow")
    content = (tmp_path / "other/data-00000-of-00002.arrow").read_bytes()
    (target / "broken.arrow").write_bytes(content[: len(content) // 2])
    (target / "empty.arrow").touch()
    if state is not None:
        (target / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message) as caught:
        build(str(target))
    assert "\n" not in str(caught.value)


def test_damage_never_crashes(tmp_path: Path) -> None:
    """An offset beyond the text made Arrow read foreign memory."""
    pytest.importorskip("pyarrow")
    file = save_rows(tmp_path / "saved", labeled("a", "b")) / "data-00000-of-00002.arrow"
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        os.utime(file, ns=(place, place))
        try:
            build(str(tmp_path / "saved"))
        except GpipeError as error:
            assert "\n" not in str(error)


def test_a_missing_package_or_column_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_rows(tmp_path / "saved", labeled("a", "b"))
    with pytest.raises(DataError, match=r"has no column 'body'; set data\.field to one of: label, text"):
        build(str(saved), field="body")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"needs the package pyarrow; install it: pip install 'gpipe-cli\[data\]'"
    ):
        build(str(saved), cache=str(tmp_path / "another"))


@pytest.mark.slow
def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = datasets.Dataset.from_list(
        [{"text": text, "label": len(text) % 2} for text in TEXTS], features=label
    )
    shuffled = rows.shuffle(seed=0)
    datasets.DatasetDict(train=shuffled, test=rows).save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "rows.parquet")
    saved, parquet = build(str(tmp_path / "saved")), build(str(tmp_path / "rows.parquet"))
    assert targets(saved.train) == shuffled["label"][:] and saved.class_names == ("no", "yes")
    assert targets(saved.test) == targets(parquet.train) == rows["label"][:]
