"""Prompt files: what is read, and what each kind of bad file is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shared_runtime.data import DataError, PromptDataset
from shared_runtime.data.files import split_slice


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", [{"input": f"{i}+{i}=", "answer": 2 * i} for i in range(10)])


def test_prompt_label_metadata_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"q": "one", "a": 0, "extra": {"rm_type": "math"}}\n\n'
        '{"q": [{"role": "user", "content": "two"}], "a": null, "extra": null}\n{"q": "three\\u2028four"}\n'
    )
    data = PromptDataset.load(path, input_key="q", label_key="a", metadata_key="extra")
    assert [row.prompt for row in data] == ["one", [{"role": "user", "content": "two"}], "three\u2028four"]
    assert [row.label for row in data] == [0, None, None]
    assert data[0].metadata == {"rm_type": "math"}
    assert data[1].metadata == {}
    assert data.where(1) == f"{path}:3"


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}\r\n')
    assert [row.prompt for row in PromptDataset.load(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("part", "expected"),
    [("[2:5]", range(2, 5)), ("[:3]", range(3)), ("[7:]", range(7, 10)), ("[-2:]", range(8, 10)), ("[:]", range(10))],
)
def test_slices_are_those_of_python(sums: Path, part: str, expected: range) -> None:
    data = PromptDataset.load(f"{sums}@{part}", label_key="answer")
    assert [row.label for row in data] == [2 * i for i in expected]
    assert data.where(0) == f"{sums}:{expected[0] + 1}"


@pytest.mark.parametrize("part", ["[5:5]", "[0:11]", "[20:]", "[-11:]"])
def test_slice_outside_the_rows_is_an_error(sums: Path, part: str) -> None:
    with pytest.raises(DataError, match=r"sums.jsonl: the slice .* has 10"):
        PromptDataset.load(f"{sums}@{part}")


def test_malformed_slice(sums: Path) -> None:
    with pytest.raises(DataError, match="as a slice"):
        PromptDataset.load(f"{sums}@[a:b]")


def test_a_name_with_an_at_sign_is_a_path() -> None:
    assert split_slice("me@home/a.jsonl") == (Path("me@home/a.jsonl"), None)


def test_missing_file_names_the_nearest(sums: Path) -> None:
    with pytest.raises(DataError, match=r"sum\.jsonl: no such file; did you mean .*sums\.jsonl"):
        PromptDataset.load(sums.with_name("sum.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        PromptDataset.load(sums.parent)


def test_every_bad_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "ok"}\n{"input": \n[1, 2]\n{"input": "ok"}\n7\n')
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:3", f"{path}:5"]
    assert "not valid JSON" in lines[0]
    assert "an array, not a JSON object" in lines[1]


def test_invalid_utf8_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"input": "ok"}\n{"input": "\xff\xff"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: not valid UTF-8"):
        PromptDataset.load(path)


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [{"input": ""}] * 25)
    with pytest.raises(DataError, match="and 15 more like these"):
        PromptDataset.load(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"empty.jsonl: has no rows"):
        PromptDataset.load(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"input_key": "inputs"}, "'inputs' (--input-key); did you mean 'input'? keys there are: answer, input"),
        ({"label_key": "label"}, "'label' (--label-key); keys there are: answer, input"),
        ({"metadata_key": "meta"}, "'meta' (--metadata-key)"),
    ],
)
def test_key_that_no_row_has(sums: Path, keys: dict[str, str], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        PromptDataset.load(sums, **keys)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("  \n", "empty prompt"),
        ([], "a list without messages"),
        ([{"role": "user", "content": ""}], "no message has content"),
        ([{"content": "hi"}], "message 0"),
        (["hi"], "message 0"),
        (12, "is int, not a string"),
        (None, "is NoneType"),
    ],
)
def test_bad_prompts(tmp_path: Path, prompt: object, expected: str) -> None:
    path = write(tmp_path / "p.jsonl", [{"input": "fine"}, {"input": prompt}])
    with pytest.raises(DataError, match=r"p\.jsonl:2: ") as caught:
        PromptDataset.load(path)
    assert expected in str(caught.value)


def test_metadata_must_be_an_object(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"input": "a", "metadata": "x"}])
    with pytest.raises(DataError, match=r"p.jsonl:1: 'metadata' is str, not an object"):
        PromptDataset.load(path)


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"input": f"p{i}", "label": i, "metadata": {"rm_type": "f1"}} for i in range(6)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    jsonl = PromptDataset.load(f"{write(tmp_path / 'a.jsonl', rows)}@[2:5]", label_key="label")
    parquet = PromptDataset.load(f"{tmp_path / 'a.parquet'}@[2:5]", label_key="label")
    assert parquet.rows == jsonl.rows
    assert parquet.where(0).endswith("a.parquet:3")


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        PromptDataset.load(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("no")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"tandem-shared-runtime\[parquet\]"):
        PromptDataset.load(tmp_path / "a.parquet")
