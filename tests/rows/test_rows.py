"""What cannot be a row is named by file, line and field, with what was expected; nothing is guessed or dropped."""

import functools
import json
import os
import random
import re

import pytest
from parsers import CALLS, answer, other_answer

from accel_sft import UserError, read_rows
from accel_sft.api.errors import what_and_where
from accel_sft.rows import json_stream
from accel_sft.rows import reading as row_reading
from accel_sft.rows.sources import absent_rows


@pytest.fixture(autouse=True, params=["held", "from the file"])
def way(request, own_cache, monkeypatch):
    """Small files are held in memory; of large ones the place of each row is kept in the cache."""
    if request.param != "held":
        monkeypatch.setattr(row_reading, "IN_MEMORY_BYTES", 0)
    return request.param


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.json"

    def write(content):
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


def problems(path):
    with pytest.raises(UserError) as caught:
        read_rows(path, answer)
    lines = caught.value.problems
    assert all(line.startswith(str(path)) and "\n" not in line for line in lines)
    return [line.removeprefix(str(path)) for line in lines]


ROWS = [{"answer": "1 + 4"}, {"answer": "王大丫丫\u2028", "more": [1.5, None, {"x": "😀"}]}]
WELL_FORMED = {
    "array, indented": "\n\r\n " + json.dumps(ROWS, indent=4, ensure_ascii=False),
    "lines": "\n".join(map(json.dumps, ROWS)),
    "lines with CRLF and blank ones": "\r\n\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    "byte-order mark": "\ufeff" + json.dumps(ROWS),
}


@pytest.mark.parametrize("content", WELL_FORMED.values(), ids=WELL_FORMED)
def test_arrays_and_lines_are_distinguished_by_content(file, content):
    assert read_rows(file(content), answer) == [row["answer"] for row in ROWS]


@pytest.mark.parametrize("array", [False, True])
def test_rows_are_a_sequence_like_a_list(file, array):
    draw = random.Random(0)
    texts = ["".join(draw.choices('aé王😀"\\ \n', k=draw.randrange(200))) for _ in range(300)]
    dumped = [json.dumps({"answer": text}, ensure_ascii=draw.random() < 0.5) for text in texts]
    rows = read_rows(file("[" + ",\n \n".join(dumped) + "]" if array else "\n\n".join(dumped)), answer)
    assert list(rows) == texts
    assert rows == texts
    assert rows != texts[:-1]
    assert (len(rows), rows[-1], rows[7]) == (300, texts[-1], texts[7])
    assert rows[250:3:-7][2:9] == texts[250:3:-7][2:9]
    assert list(reversed(rows)) == texts[::-1]
    assert texts[5] in rows
    with pytest.raises(IndexError):
        rows[300]


def test_the_fingerprint_is_of_the_rows_and_the_parser(file):
    path = file('{"answer": "1"}\n{"answer": "2"}\n')
    parsers = (answer, functools.partial(other_answer, "a"), functools.partial(other_answer, "b"))
    fingerprints = [read_rows(path, parser).fingerprint for parser in parsers]
    fingerprints.append(read_rows(path, answer)[1:].fingerprint)
    fingerprints.append(read_rows(file('{"answer": "1"}\n{"answer": "3"}\n'), answer).fingerprint)
    assert len(set(fingerprints)) == 5
    assert read_rows(file('{"answer": "1"}\n{"answer": "2"}\n'), answer).fingerprint == fingerprints[0]
    assert read_rows(path, lambda row: row["answer"]).fingerprint is None  # another lambda looks the same


def test_a_large_file_is_checked_once(file, way, own_cache, capsys):
    path = file("\n".join(map(json.dumps, ROWS)))
    CALLS.clear()
    read_rows(path, answer)
    assert len(CALLS) == 2
    assert read_rows(path, answer) == [row["answer"] for row in ROWS]
    assert len(CALLS) == (6 if way == "held" else 4)
    if way == "held":
        return
    (places,) = own_cache.glob("rows/*/places.bin")
    content = bytearray(places.read_bytes())
    content[3] ^= 1
    places.write_bytes(content)
    CALLS.clear()
    assert read_rows(path, answer)[0] == ROWS[0]["answer"]
    assert len(CALLS) == 3
    assert "damaged (places.bin has changed since it was written); it is made again" in capsys.readouterr().out


@pytest.mark.parametrize("content", [json.dumps(ROWS), "answer\n" + "\n".join(row["answer"] for row in ROWS)])
def test_without_a_cache_rows_are_checked_every_time(file, way, monkeypatch, tmp_path, capsys, content):
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(file("{}") / "cache"))
    path = tmp_path / ("other.json" if content.startswith("[") else "other.csv")
    path.write_text(content)
    assert read_rows(path, answer) == [row["answer"] for row in ROWS]
    is_held = way == "held" and content.startswith("[")
    assert ("rows cannot be kept here (Not a directory)" in capsys.readouterr().out) != is_held
    assert read_rows(path, lambda row: row["answer"])[0] == ROWS[0]["answer"]  # no fingerprint: nothing to find


def test_row_changed_while_in_use_is_not_taken_unchecked(file, way):
    path = file("\n".join(map(json.dumps, ROWS)))
    rows = read_rows(path, answer)
    os.utime(path, (0, 0))
    assert rows[0] == ROWS[0]["answer"]
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1 + 4", b"2 + 3"))
    if way == "held":
        assert rows[0] == ROWS[0]["answer"]
    else:
        with pytest.raises(UserError, match=r"rows\.json:1: was changed while it was in use"):
            rows[0]
    assert rows[1] == ROWS[1]["answer"]


@pytest.mark.parametrize("content", ["{row}", "[{row}]"])
def test_numbers_keep_the_text_that_the_file_has(file, content):
    row = '{"n": 12.50, "in": [1E5, 1.0], "whole": 3}'
    (read,) = read_rows(file(content.replace("{row}", row)), dict)
    assert read == {"n": 12.5, "in": [1e5, 1.0], "whole": 3}
    assert [str(read["n"]), *map(str, read["in"])] == ["12.50", "1E5", "1.0"]
    assert json.dumps(read) == '{"n": 12.5, "in": [100000.0, 1.0], "whole": 3}'


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "pipe"])
def test_pipe_or_device_is_refused(tmp_path, path):
    if path == "pipe":
        os.mkfifo(path := tmp_path / path)  # to open it would wait for ever
    with pytest.raises(UserError, match=f"{path}: is a pipe or a device, not a file; give a JSON, JSONL, CSV, Parquet"):
        read_rows(path, answer)


MALFORMED = {
    "field missing": ("{}", " field 'answer': expected text, got NoneType"),
    "not an object": ("[1]", " expected a JSON object, got list"),
    "key twice, inside": ('{"answer": "1", "x": {"y": 1, "y": 2}}', " field 'y': expected each key once"),
    "NaN": ('{"answer": "1", "x": [NaN]}', " NaN is not JSON; use null or a number"),
    "half a surrogate pair in a key": (r'{"answer": "1", "\ude00": 1}', " a lone surrogate"),
    "nested too deeply": ('{"answer": "1", "x": ' + "[" * 120 + "]" * 120 + "}", " nested too deeply"),
}
MALFORMED_LINES = MALFORMED | {
    "cut off": ('{"answer": "1', " not JSON at column 12: Unterminated string starting at"),
    "two objects": ('{"answer": "1"} {"answer": "2"}', " not JSON at column 17: Extra data"),
    "nested beyond reading": ('{"answer": "1", "x": ' + "[" * 200_000 + "]" * 200_000 + "}", " nested too deeply"),
    "a number too long to read": ('{"answer": "1", "x": ' + "9" * 5000 + "}", " Exceeds the limit"),
}


@pytest.mark.parametrize(("line", "expected"), MALFORMED_LINES.values(), ids=MALFORMED_LINES)
def test_malformed_line_is_named_and_others_are_read(file, line, expected):
    first, last = problems(file('{"answer": "first"}\n' + line + '\n\n{"answer": 4.5}\n'))
    assert first.startswith(f":2:{expected}")
    assert last == ":4: field 'answer': expected text, got float"


@pytest.mark.parametrize(("element", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_element_is_named_by_number_and_others_are_read(file, element, expected):
    first, last = problems(file('[{"answer": "first"},\n' + element + ',\n\n{"answer": 4.5}\n]'))
    assert first.startswith(f" row 2:{expected}")
    assert last == " row 3: field 'answer': expected text, got float"


BROKEN_ARRAYS = {
    "comma missing": ('[{"answer": "1"}\n{"answer": "2"}]', " row 1: expected ',' or ']' after this row; is the file"),
    "cut off inside": ('[{"answer": "1"},\n{"answer":\n "2', " row 2: not JSON at line 3, column 2: Unterminated str"),
    "comma at the end": ('[{"answer": "1"},\n]', " row 1: a comma follows, but no row after the comma"),
    "text behind": ('[{"answer": "1"}]\n[]', " row 1: text after the end of the array: '[]'"),
    "nested beyond reading": ("\n" + "[" * 200_000, " row 1: nested too deeply; the rest was not read"),
}


@pytest.mark.parametrize(("content", "expected"), BROKEN_ARRAYS.values(), ids=BROKEN_ARRAYS)
def test_a_broken_array_says_where_reading_ended(file, content, expected):
    (problem,) = problems(file(content))
    assert problem.startswith(expected)


def test_twenty_problems_are_listed_and_the_rest_counted(file):
    lines = problems(file("".join(f'{{"k{line}": 1, "k{line}": 2}}\n' for line in range(1, 24))))
    assert [line.split(": expected")[0] for line in lines[:20]] == [f":{n}: field 'k{n}'" for n in range(1, 21)]
    assert lines[20:] == [": and 3 more bad rows; nothing was trained"]


def test_problem_of_many_rows_is_listed_once(file):
    missing = "field 'answer': expected text, got NoneType"
    (line,) = problems(file("{}\n" * 1234))
    assert line == f":1: {missing}; lines 2, 3, 4, 5, 6, and 1,228 more have the same problem"
    assert problems(file('{}\n{"answer": 1}\n{}\n')) == [
        f":1: {missing}; line 3 has the same problem",
        ":2: field 'answer': expected text, got int",
    ]
    assert problems(file('[{"answer": "a"}, {}, {}, {}]')) == [f" row 2: {missing}; rows 3, 4 have the same problem"]


@pytest.mark.parametrize("mark", ["", "\ufeff\n"])
def test_objects_over_several_lines_are_one_problem(file, mark):
    content = json.dumps({"answer": "a"}, indent=2) + "\n"
    (problem,) = problems(file(mark + 30 * content))
    at = 1 + mark.count("\n")
    assert problem == f":{at}: an object over several lines; write each row on one line: jq -c . FILE > NEW"
    assert len(problems(file(mark + '{"answer": "a"\n{}\n'))) == 2, "the first row is cut off"


@pytest.mark.parametrize("content", ["", "  \n\n", "[]", " [ ] "])
def test_a_file_without_rows_is_refused(file, content):
    (problem,) = problems(file(content))
    assert problem == ": has no rows; expected a JSON array of objects, one JSON object per line, or a header and rows"


def test_bytes_that_are_not_utf8_are_named_by_line(file):
    (problem,) = problems(file('{"answer": "1"}\n{"answer": "é"}\n'.encode("latin-1")))
    assert problem.startswith(":2: not UTF-8")


def test_error_passing_through_the_reader_names_the_callers_line(file):
    rows = read_rows(file('{"answer": "1"}'), answer)
    with pytest.raises(TypeError) as caught:
        rows["first"]
    assert re.search(rf"\({re.escape(__file__)}:\d+\)$", what_and_where(caught.value))


def test_a_line_without_an_end_is_refused(file, monkeypatch):
    monkeypatch.setattr(json_stream, "MAX_ROW_BYTES", 1 << 20)
    longest = json.dumps({"answer": "a" * ((1 << 20) - 15)}) + "\n"
    assert len(longest) == 1 << 20
    assert len(read_rows(file(longest), answer)) == 1
    assert problems(file(longest + " " * (1 << 21))) == [":2: a line of more than 1 MiB; give each row its own line"]


def test_a_file_that_cannot_be_read(tmp_path):
    assert problems(tmp_path / "none.json")[0].startswith(": cannot be read (No such file or directory)")
    assert problems(tmp_path)[0].startswith(": no data files in this folder; expected .json, .jsonl")


def test_several_files_are_read_in_order_with_their_names(tmp_path):
    (tmp_path / "c").mkdir()
    file, folder, within = tmp_path / "b.jsonl", tmp_path / "c", tmp_path / "c" / "d.jsonl"
    for path in (file, within):
        path.write_text("".join(json.dumps({"answer": f"{path.stem}{row}"}) + "\n" for row in range(2)))
    rows = read_rows(f"{file},{folder}", answer)
    assert list(rows) == ["b0", "b1", "d0", "d1"]
    assert [str(place) for place in rows.places([1, 2])] == [f"{file}:2", f"{within}:1"]
    assert rows.fingerprint != read_rows(f"{folder},{file}", answer).fingerprint
    file.write_text('{"answer": 1}\n')
    within.write_text('{"answer": "x"}\n{"answer": 2}\n')
    with pytest.raises(UserError) as caught:
        read_rows(f"{file},{folder}", answer)
    assert [line.split(" field")[0] for line in caught.value.problems] == [f"{file}:1:", f"{within}:2:"]


@pytest.mark.parametrize("names", ["", "rows.json,", ",rows.json"])
def test_empty_name_is_refused_and_reads_no_folder(names):
    with pytest.raises(UserError, match="has an empty name; give a file, a folder or a data set, with commas"):
        read_rows(names, answer)
    (line,) = absent_rows(names, "--train-file")
    assert line.startswith(f"--train-file {names!r}: has an empty name")
