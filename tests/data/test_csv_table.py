"""CSV files as samples: columns, classes and numbers, and a line for everything that is wrong with a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.data import csv_table
from gpipe_cli.data.csv_table import TableSamples, build
from gpipe_cli.data.datasets import Data
from gpipe_cli.errors import ConfigError, DataError

FLOWERS = b'\xef\xbb\xbfid,"width, cm",kind\r\n1,0.5,iris\r\n\r\n2,1.5,"da\nisy"\r\n3,2.5,iris\r\n'


def table(folder: Path, content: bytes, **keys: Any) -> Data:
    path = folder / "table.csv"
    path.write_bytes(content)
    return build(**{"path": str(path), "target": "b", "predicts_numbers": False, **keys})


def samples(data: Data) -> tuple[list[Any], list[Any]]:
    assert isinstance(data.train, TableSamples)
    inputs, targets = data.train.batch(torch.arange(len(data.train)))
    return inputs.tolist(), targets.tolist()


def test_text_in_the_target_column_makes_classes_in_alphabetical_order(tmp_path: Path) -> None:
    data = table(tmp_path, FLOWERS, target="kind", ignore=["id"])
    assert samples(data) == ([[0.5], [1.5], [2.5]], [1, 0, 1])
    assert (data.classes, data.shape, data.test) == (2, (1,), None)
    assert data.class_names == ("da\nisy", "iris") and data.feature_names == ("width, cm",)
    swapped = table(tmp_path, FLOWERS, target="kind", features=["width, cm", "id"])
    assert swapped.feature_names == ("width, cm", "id") and samples(swapped)[0][1] == [1.5, 2.0]


def test_whole_numbers_are_classes_by_value_and_columns_may_have_no_names(tmp_path: Path) -> None:
    data = table(tmp_path, b"10;1\n9;2\n-3;4\n9;8\n", target=0, header=False, delimiter=";")
    assert data.class_names == ("-3", "9", "10")
    assert samples(data) == ([[1.0], [2.0], [4.0], [8.0]], [2, 1, 0, 1])


def test_numbers_to_predict_are_a_column_each_and_the_loss_or_the_task_decides(tmp_path: Path) -> None:
    content = b"a,b,c\n1,2,3\n4,5,6\n"
    data = table(tmp_path, content, predicts_numbers=True)
    assert samples(data) == ([[1.0, 3.0], [4.0, 6.0]], [[2.0], [5.0]])
    assert (data.classes, data.class_names) == (1, None)
    both = table(tmp_path, content, target=["c", "a"], task="regression")
    assert (both.classes, samples(both)[1]) == (2, [[3.0, 1.0], [6.0, 4.0]])
    assert table(tmp_path, content, predicts_numbers=None).class_names == ("2", "5")
    halves = table(tmp_path, b"a,b\n1,2.5\n4,5\n", predicts_numbers=None)
    assert halves.class_names is None and samples(halves)[1] == [[2.5], [5.0]]


def test_features_are_normalized_by_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    data = table(tmp_path, b"a,c,b\n1,7,x\n3,7,y\n99,7,x\n")
    assert isinstance(data.train, TableSamples)
    assert data.train.mean_and_std(torch.tensor([0, 1])) == ((2.0, 7.0), (1.0, 1.0))


def test_a_second_file_is_the_test_set_and_has_the_classes_of_the_first(tmp_path: Path) -> None:
    other = tmp_path / "test.csv"
    other.write_text("a,b\n5,y\n")
    data = table(tmp_path, b"a,b\n1,x\n3,y\n", test=str(other))
    assert data.test is not None and int(data.test[0][1]) == 1
    other.write_text("a,b\n5,z\n")
    with pytest.raises(DataError, match=r"test\.csv, line 2, column 'b': 'z' is no class of data\.path"):
        table(tmp_path, b"a,b\n1,x\n3,y\n", test=str(other))
    other.write_text("c,b\n5,x\n")
    with pytest.raises(DataError, match=r"its columns are not those of data\.path"):
        table(tmp_path, b"a,b\n1,x\n3,y\n", test=str(other))


def test_a_target_far_from_zero_is_pointed_out(tmp_path: Path) -> None:
    data = table(tmp_path, b"a,b\n1,250000\n2,350000\n", predicts_numbers=True)
    assert data.notes == (
        "data.target=b: its values are about 300,000, which takes a network long to reach; give it in larger units, "
        "such as thousands",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n", "has no rows"),
        (b"\xff\xfea\x00,\x00b\x00\n\x00", "is not UTF-8 text"),
        (b"a,b\n1,\0\n", "line 2: is no text: it has a null byte"),
        (b"a,b\n1,x\n3\n", "line 3: the number of fields is 1, but 2 in the first line"),
        (b"a,b\n1,x\n,x\n", "line 3, column 'a': is missing; fill it in, or leave out the row or the column"),
        (b"a,b\n1,x\nNaN,x\n", "line 3, column 'a': is missing"),
        (b"a,b\n-inf,x\n", "line 2, column 'a': '-inf' is not finite, or too large"),
        (b"a,b\n1e300,x\n", "line 2, column 'a': '1e300' is not finite, or too large"),
        (
            b"a,b\nred,x\n",
            "line 2, column 'a': 'red' is no number; write it as a number, or leave the column out",
        ),
        (b"a,b\n1,x\n2,\n", "line 3, column 'b': is missing"),
        (b'a,b\n1,"x\n', "line 2: is no CSV: unexpected end of data"),
        (b"a,a,b\n", "has two columns named 'a'; rename one of them"),
        (b"a,,b\n", "column 2 has no name in the first line"),
        (b"a,b\n1,0.5\n2,1\n", "data.target=b: has numbers such as 0.5, not classes; choose loss=mse"),
        (
            b"a,b\n" + b"".join(b"1,%d\n" % number for number in range(30)),
            "data.target=b: 30 different values in 30 rows are no classes; choose another column, or loss=mse",
        ),
        (b"a,b\n1," + b"9" * 200_000, "line 2: is no CSV: field larger than field limit"),
        (
            b",".join(b"c%d" % number for number in range(2**17 + 1)),
            "has 131,073 columns; gpipe reads at most",
        ),
    ],
    ids=range(18),
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        table(tmp_path, content)
    error = str(caught.value)
    assert message in error and len(error) < 400
    assert error.startswith((str(tmp_path / "table.csv"), "data.target=b"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target": "c"}, r"data\.target=c: .*table\.csv has no such column; choose one of: a, b"),
        ({"ignore": ["id"]}, r"data\.ignore=id: .* has no such column"),
        ({"features": ["b"]}, r"data\.target=b: is also in data\.features"),
        ({"features": ["a", "a"]}, r"data\.features: names a column twice"),
        ({"ignore": ["a"]}, r"data\.features: no column of .*table\.csv is left besides the target"),
        ({"target": ["a", "b"]}, "classification takes one column; loss=mse predicts several numbers"),
        ({"delimiter": "xx"}, r"data\.delimiter='xx': must be one character"),
        ({"delimiter": ";"}, "choose one of: a,b; if the file separates columns otherwise than by a comma"),
        ({"task": "ranking"}, r"data\.task=ranking: must be one of: classification, regression, or null"),
    ],
)
def test_keys_that_do_not_fit_the_file_are_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        table(tmp_path, b"a,b\n1,x\n2,y\n", **keys)


def test_a_first_line_of_numbers_suggests_that_there_is_no_header(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with data\.header=false columns are numbered from 0"):
        table(tmp_path, b"1,2\n3,4\n")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("pipe", "is a named pipe"), ("", "is a directory"), ("none", "No such file")):
        with pytest.raises(DataError, match=rf"data\.path=.*: cannot be read: {problem}"):
            build(str(tmp_path / name), "b")


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "MAX_LINE", 100)
    with pytest.raises(DataError, match=r"table\.csv, line 1: has more than 100 characters"):
        table(tmp_path, b"a" * 200)


def test_a_class_that_is_written_in_two_ways_is_refused(tmp_path: Path) -> None:
    message = r"data\.target=b: writes the same class in two ways, such as 1 and 1\.0"
    with pytest.raises(DataError, match=message):
        table(tmp_path, b"a,b\n1,0\n2,1\n3,1.0\n")
