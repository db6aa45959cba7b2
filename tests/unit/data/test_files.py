"""Rows are read unchanged, and unreadable rows are named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.files import read_rows
from mcore_rl.errors import DataError


def rows_of(path: Path, content: str | bytes) -> list[tuple[str, dict[str, Any]]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path, "data.train"))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def test_read_rows_lone_surrogate_names_line_and_column(jsonl: Path) -> None:
    for row, name in (
        (r'{"question": "a \ud83d b"}', "question"),
        (r'{"question": "\ude00\ud83d"}', "question"),
        (r'{"prompt": [{"role": "user", "content": "\uD83D"}]}', "prompt.content"),
        (r'{"extra_info": {"a": [{"b": "\udfff"}]}}', "extra_info.a.b"),
        (r'{"x\udc00": 1}', "a name"),
    ):
        with pytest.raises(DataError, match=rf"^data\.train: .*jsonl, line 2: {name} contains half of a character"):
            rows_of(jsonl, '{"question": "a"}\n' + row + "\n")


def test_read_rows_all_lone_surrogates_are_named_at_once(jsonl: Path) -> None:
    lines = ['{"a": "b"}', r'{"a": "\ud83d"}', "", r'{"a": "\\ud83d"}', r'{"a": "\ud83d"}', "{torn", r'{"a": "\ud83d"}']
    with pytest.raises(DataError, match=r"line 2: .* \(the same in 2 further lines: 5, 7\)$"):
        rows_of(jsonl, "\n".join(lines))


def test_read_rows_surrogate_pairs_and_backslashes_are_text(jsonl: Path) -> None:
    rows = rows_of(jsonl, r'{"a": "\ud83d\ude00", "b": "\\ud83d", "c": "\ud55c", "d": "😀"}')
    assert rows[0][1] == {"a": "😀", "b": r"\ud83d", "c": "한", "d": "😀"}


@pytest.mark.parametrize("half", [b"\xff", b"\xed\xa0\xbd", b"\xed\xa0\xbd\xed\xb8\x80"])
def test_read_rows_surrogate_bytes_are_not_utf8(jsonl: Path, half: bytes) -> None:
    with pytest.raises(DataError, match=r"line 2 is not valid JSON: it is not UTF-8 \(0x.. is byte 8 of the line\)"):
        rows_of(jsonl, b'{"a": "b"}\n{"a": "' + half + b'"}\n')


def test_read_rows_deep_nesting_is_rejected(jsonl: Path) -> None:
    for depth in (150, 100_000):
        deep = '{"answer": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(DataError, match=r"^data\.train: .*rows\.jsonl, line 2 is nested more than 100 levels deep"):
            rows_of(jsonl, '{"answer": 1}\n' + deep)
    row = {"answer": [[{}]] * 200, "deep": json.loads("[" * 90 + "]" * 90)}  # many brackets, but not deep
    assert rows_of(jsonl, json.dumps(row))[0][1] == row


def test_read_rows_byte_order_marks_are_removed(jsonl: Path, table: Path) -> None:
    assert rows_of(jsonl, b'\xef\xbb\xbf{"a": "b"}\n\xef\xbb\xbf{"a": "c"}\n')[1][1] == {"a": "c"}
    assert rows_of(table, b"\xef\xbb\xbfquestion,answer\na,b\n")[0][1] == {"question": "a", "answer": "b"}


def test_read_rows_parquet_binary_row_is_named(tmp_path: Path) -> None:
    raw = pa.array([b"ok"] * 1030 + [b"a\xed\xa0\xbd"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"answer": ["1"] * len(raw), "question": broken}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 1031: column 'question' is not UTF-8"):
        list(read_rows(tmp_path / "rows.parquet", "data.train"))


def test_read_rows_csv_values_are_unchanged_text(table: Path) -> None:
    content = 'question, answer ,n\n007,1e3,\n"a, ""b""\nc",TRUE, x \n\nNA,1.10,null\n'
    assert rows_of(table, content) == [
        (f"{table}, line 2", {"question": "007", "answer": "1e3", "n": None}),
        (f"{table}, line 3", {"question": 'a, "b"\nc', "answer": "TRUE", "n": " x "}),
        (f"{table}, line 6", {"question": "NA", "answer": "1.10", "n": "null"}),
    ]


def test_read_rows_csv_with_index_crlf_and_long_cell(table: Path) -> None:
    assert rows_of(table, ",question\r\n0,a\r\n1,b")[1] == (f"{table}, line 3", {"question": "b"})
    assert rows_of(table, "question\n" + "x" * 200_000 + "\n")[0][1] == {"question": "x" * 200_000}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"q,a\n1,2\n1,2,3\n", r"line 3 has 3 cells, but the file has 2 columns"),
        (b"q,a\n1,2\n1\n", r"line 3 has 1 cells"),
        (b'q,a\n1,2\n"1,2\n3,4\n', r"line 3 is not valid CSV: unexpected end of data"),
        (b'q,a\n"1" x,2\n', r"line 2 is not valid CSV: .*double quotes"),
        (b'q,a\n"1\n\xff",2\n', r"line 3 is not valid CSV: it is not UTF-8"),
        ("q,a\n1,2\n".encode("utf-16"), r"line 1 is not valid CSV: it is not UTF-8"),
        (b"q,q\n1,2\n", r"line 1 repeats column names: q"),
    ],
)
def test_read_rows_malformed_csv_names_line(table: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.train: .*rows\.csv, {message}"):
        rows_of(table, content)


def test_read_rows_csv_without_rows_is_empty(table: Path) -> None:
    assert [rows_of(table, content) for content in ("", "\n", "question,answer\n")] == [[], [], []]
