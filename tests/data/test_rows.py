import datetime
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data.row_files import read_rows


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def write_lines(path, *lines):
    path.write_text("\n".join(lines))
    return str(path)


def test_a_parquet_column_and_its_nested_column_are_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", reward_model=[{"ground_truth": "7", "style": "rule"}], n=[3])
    rows = read_rows(path, ["reward_model.ground_truth", "n"])
    assert rows.serializable_column("reward_model.ground_truth") == ["7"]
    assert rows.serializable_column("n") == [3]


def test_a_column_name_with_a_dot_precedes_a_nested_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", **{"a.b": ["flat"], "a": [{"b": "nested"}]})
    assert read_rows(path, ["a.b"]).column("a.b") == ["flat"]


def test_jsonl_lines_are_numbered_from_one_and_blank_lines_are_skipped(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", '\ufeff{"x": 1}', "", '{"x": "schön\\u2028"}', "")
    rows = read_rows(path, ["x"])
    assert rows.column("x") == [1, "schön\u2028"]
    assert rows.where(1) == f"{path}, line 3"


def test_the_digest_changes_with_the_content(tmp_path):
    first = read_rows(write_lines(tmp_path / "a.jsonl", '{"x": 1}'), ["x"]).digest
    same = read_rows(write_lines(tmp_path / "b.jsonl", '{"x": 1}'), ["x"]).digest
    other = read_rows(write_lines(tmp_path / "a.jsonl", '{"x": 2}'), ["x"]).digest
    assert first == same != other


def test_the_error_names_a_missing_file_or_a_directory(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.parquet: no such file, expected"):
        read_rows(str(tmp_path / "gone.parquet"), ["x"])
    with pytest.raises(ValueError, match=r"the directory .*nowhere does not exist"):
        read_rows(str(tmp_path / "nowhere" / "gone.parquet"), ["x"])
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(ValueError, match=r"folder\.parquet: not a file"):
        read_rows(str(tmp_path / "folder.parquet"), ["x"])


def test_an_unknown_extension_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv: file type '\.csv', expected \.parquet or \.jsonl"):
        read_rows(write_lines(tmp_path / "a.csv", "x"), ["x"])


@pytest.mark.parametrize("name", ["empty.parquet", "empty.jsonl"])
def test_a_file_without_rows_is_refused(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        write_parquet(path, x=pa.array([], pa.string()))
    else:
        write_lines(path, "", "  ")
    with pytest.raises(ValueError, match=rf"{name}: the file has no rows"):
        read_rows(str(path), ["x"])


def test_the_error_names_a_broken_parquet_file(tmp_path):
    path = tmp_path / "torn.parquet"
    write_parquet(path, x=["a"] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"torn\.parquet: not a readable parquet file"):
        read_rows(str(path), ["x"])


def test_a_missing_parquet_column_lists_the_existing_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", prompt=["x"], answer=["y"])
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'solution', found \['answer', 'prompt'\]"):
        read_rows(path, ["prompt", "solution"])


def test_the_error_for_a_missing_nested_column_names_the_row_and_the_missing_part(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", reward_model=[{"truth": "7"}])
    rows = read_rows(path, ["reward_model.ground_truth"])
    with pytest.raises(ValueError, match=r"row 0: no column 'reward_model.ground_truth': 'ground_truth' expected"):
        rows.column("reward_model.ground_truth")


def test_the_error_names_a_line_that_lacks_a_key(tmp_path):
    rows = read_rows(write_lines(tmp_path / "a.jsonl", '{"prompt": "a"}', '{"promt": "b"}'), ["prompt"])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no column 'prompt': .*found \['promt'\]"):
        rows.column("prompt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', r"a\.jsonl, line 2: not JSON"),
        (
            r'{"prompt": "b", "ground_truth": "\ud83d"}',
            r"a\.jsonl, line 2: not JSON \('\\ud83d' is half of a surrogate",
        ),
        ('["b"]', r"a\.jsonl, line 2: a list, expected an object"),
    ],
)
def test_the_error_names_a_broken_line(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "a"}', line)
    with pytest.raises(ValueError, match=message):
        read_rows(path, ["prompt"])


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\xbd"])
def test_the_error_names_a_line_that_is_not_utf8(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "%b"}' % text)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: not JSON"):
        read_rows(str(path), ["prompt"])


@pytest.mark.parametrize("num_levels", [101, 500, 5000])
def test_the_error_names_json_with_too_many_levels(tmp_path, num_levels):
    deep = "[" * num_levels + "]" * num_levels
    path = write_lines(tmp_path / "a.jsonl", '{"x": 1}', f'{{"x": {deep}}}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON \(.*more than 100 levels"):
        read_rows(path, ["x"])
    rows = read_rows(write_lines(tmp_path / "b.jsonl", json.dumps({"x": deep})), ["x"])
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: column 'x' is .*, expected JSON \(it has more than 100"):
        rows.structures("x", is_json=True)


def test_values_with_many_levels_are_read(tmp_path):
    rows = read_rows(write_lines(tmp_path / "a.jsonl", '{"x": ' + "[" * 99 + "]" * 99 + "}"), ["x"])
    assert len(rows.structures("x")) == len(rows.serializable_column("x")) == 1


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), None])
def test_the_error_names_a_value_that_msgpack_cannot_encode(tmp_path, value):
    path = write_parquet(tmp_path / "a.parquet", truth=[value])
    with pytest.raises(ValueError, match=r"a\.parquet, row 0: column 'truth' is "):
        read_rows(path, ["truth"]).serializable_column("truth")


def test_integers_up_to_64_bits_are_allowed(tmp_path):
    rows = read_rows(write_lines(tmp_path / "a.jsonl", json.dumps({"x": 2**64 - 1, "y": [2**64]})), ["x", "y"])
    assert rows.serializable_column("x") == [2**64 - 1]
    with pytest.raises(ValueError, match="convert it to a string"):
        rows.serializable_column("y")


def test_reading_rows_starts_no_arrow_thread(tmp_path):
    write_parquet(tmp_path / "a.parquet", x=["1"] * 10)
    script = (
        "import os, sys\n"
        "from asyncrl.data.row_files import read_rows\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "read_rows(sys.argv[1], ['x'])\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "0"
