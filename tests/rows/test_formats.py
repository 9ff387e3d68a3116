"""Rows of CSV, Parquet, compressed files and folders are those of JSON; a bad one is named by line or number."""

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import random
import re

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from chats import jsonl
from parsers import CALLS, answer, noting

from accel_sft import UserError, read_rows
from accel_sft.rows.formats import READERS
from accel_sft.rows.row_file import Place
from accel_sft.rows.rows import with_places

TEXTS = ["1 + 4", 'two\nlines, "quoted"', "王大丫丫", ""]
JSONL = "".join(json.dumps({"answer": text}) + "\n" for text in TEXTS).encode()
CSV = b'answer,more\n1 + 4,x\n"two\nlines, ""quoted""",\n\n' + "王大丫丫,y\n,z\n".encode()


pytestmark = pytest.mark.usefixtures("own_cache")


def zstandard(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def written(folder):
    """The same rows in every format, by file name."""
    files = {
        "a.csv": CSV,
        "a.tsv": re.sub(rb",(?! )", b"\t", CSV),
        "a.jsonl": JSONL,
        "a.jsonl.gz": gzip.compress(JSONL[:9]) + gzip.compress(JSONL[9:]),
        "a.json.bz2": bz2.compress(b"[" + b",\n".join(JSONL.splitlines()) + b"]"),
        "a.ndjson.xz": lzma.compress(JSONL),
        "a.JSONL.ZST": zstandard(JSONL),
        "a.csv.gz": gzip.compress(b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n").replace(b"two\r\n", b"two\n")),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    parquet(
        folder / "a.parquet", [{"answer": text, "image": b"\xff", "day": datetime.date(2026, 1, 2)} for text in TEXTS]
    )
    return [*files, "a.parquet"]


def test_every_format_has_the_same_rows_and_is_converted_once(tmp_path):
    for name in written(tmp_path):
        CALLS.clear()
        assert list(read_rows(tmp_path / name, answer)) == TEXTS, name
        checked = len(CALLS)
        again = read_rows(tmp_path / name, answer)
        assert len(CALLS) == (checked if name != "a.jsonl" else checked + len(TEXTS)), name
        assert [again[-1], *again[1:3]] == [TEXTS[3], *TEXTS[1:3]]
    assert len({read_rows(tmp_path / name, answer).fingerprint for name in written(tmp_path)}) == 9


def test_rows_stand_at_lines_or_have_numbers(tmp_path):
    written(tmp_path)
    assert [place.line for place in read_rows(tmp_path / "a.csv", answer).places(range(4))] == [2, 3, 6, 7]
    for name in ("a.json.bz2", "a.parquet"):
        places = read_rows(tmp_path / name, answer).places(range(4))
        assert [str(place) for place in places] == [f"{tmp_path}/{name} row {n}" for n in range(1, 5)]


BAD = {
    "too few fields": ("a.csv", b"answer,more\nx,y\nz\n", ":3: 1 fields, but the header has 2 (answer, more)"),
    "not the column": (
        "a.csv",
        b"answers,n\nx,1\n",
        ":2: field 'answer': expected text, got NoneType; the row has answers,",
    ),
    "a column twice": ("a.csv", b"answer,answer\nx,y\n", ":1: the header has the column 'answer' twice; rename"),
    "files joined": ("a.csv", b"answer,more\nx,y\n\xef\xbb\xbfanswer,more\n", ":3: this line repeats the header, as"),
    "an archive": ("a.jsonl", b"PK\x03\x04\x14\0\xff", ":1: not text (byte 6); unpack it if it is an"),
    "UTF-32": ("a.jsonl", JSONL.decode().encode("utf-32"), ":1: not text (byte 0); convert it: iconv -f UTF-32 -t"),
    "a key beside the rows": (
        "a.json",
        b'{"data": [{"answer": "x"}], "n": 1}',
        " row 1: text after the end of the arr",
    ),
    "no end of a quote": ("a.csv", b'answer\n"x\n', ":2: not CSV (unexpected end of data); the rest was not"),
    "quotes that may not be quoting": (
        "a.tsv",
        b'more\tanswer\n0\tx\n1\t"a\n2\tb"\n3\tc\n',
        ":3: not CSV (quotes around tabs and line breaks may belong to the text of several rows); the rest was not",
    ),
    "blanks behind commas": (
        "a.csv",
        b'answer,more\n"x", "y"\n',
        ":2: not CSV (a blank between ',' and a quote",
    ),
    "latin-1": ("a.csv", "answer\nx\né\n".encode("latin-1"), ": not UTF-8 (in this line or a later one); convert"),
    "cut off": ("a.jsonl.gz", gzip.compress(JSONL)[:-9], ": cannot be decompressed (Compressed file ended"),
    "cut off, zstandard": ("a.jsonl.zst", zstandard(JSONL * 9)[:-5], ": cannot be decompressed ("),
    "Git LFS": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid x\n", ": is a pointer of Git LFS, not"),
    "not Parquet": ("a.parquet", JSONL, ": not Parquet or Arrow after row 0 ("),
}


@pytest.mark.parametrize(("name", "content", "expected"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_named(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path / name, answer)
    (problem,) = caught.value.problems
    got = problem.removeprefix(str(tmp_path / name))
    assert got.startswith(expected) or (expected.startswith(": not UTF-8") and expected in got)
    assert len(got) < 140


def test_table_by_columns_is_no_row(tmp_path):
    pandas = pytest.importorskip("pandas")
    table, path = pandas.DataFrame({"prompt": ["q1", "q2"], "completion": [["a1"], {"0": 2}]}), tmp_path / "a.json"
    for part in (table, table[1:], table[["prompt"]]):
        part.to_json(path)
        with pytest.raises(UserError, match=r'a\.json:1: expected a row, got columns, .*orient="records", lines=True'):
            read_rows(path, dict)
    rows = [{"answer": {"0": "x"}, "n": 1}, {"answer": {"0": "x"}, "more": {"1": "x"}}, {"answer": {}, "more": {}}]
    assert list(read_rows(jsonl(path, rows), dict)) == rows


def feather(compression="uncompressed"):
    pyarrow.feather.write_feather(pyarrow.table({"answer": TEXTS}), file := io.BytesIO(), compression, chunksize=2)
    return file.getvalue()


ODD = {
    "gzip by content": ("a.jsonl", gzip.compress(JSONL), TEXTS),
    "UTF-16": ("a.jsonl", JSONL.decode().encode("utf-16-le").join([b"\xff\xfe", b""]), TEXTS),
    "UTF-16, the other order": ("a.csv", CSV.decode().encode("utf-16-be").join([b"\xfe\xff", b""]), TEXTS),
    "semicolons": ("a.csv", b'more;"answer, all";answer\n1,5;x;a,b\n', ["a,b"]),
    "a quote of several lines and tabs": (
        "a.tsv",
        b'answer\tmore\n"a\nb"\tx\n\n"c\td"\t"y"\n5" c\tz\n',
        ["a\nb", "c\td", '5" c'],
    ),
    "Feather": ("a.feather", feather(), TEXTS),
    "Feather under another name": ("a.arrow", feather("lz4"), TEXTS),
    "an index": ("a.csv", b",answer\n0,x\n1,y\n", ["x", "y"]),
    "rows in an object, indented": ("a.json", b'{\n "instances": [\n  {"answer": "x"}\n ]\n}\n', ["x"]),
    "rows with data": ("a.jsonl", b'{"data": [{}], "answer": "x"}\n{"data": [{}], "answer": "y"}\n', ["x", "y"]),
    "byte-order marks within": ("a.jsonl", b"\xef\xbb\xbf".join([b"", JSONL, JSONL]), TEXTS * 2),
}


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_what_a_writer_of_csv_wrote_is_read_as_it_was(suffix):
    draw = random.Random(0)
    delimiter = {".tsv": "\t", ".csv": ","}[suffix]
    signs = ['"', "\n", "\t", " ", "a", f'{delimiter} "']
    for _ in range(500):
        cells = ["".join(draw.choices(signs, k=draw.randrange(6))) for _ in range(6)]
        rows = [{"prompt": prompt, "answer": text} for prompt, text in zip(cells[::2], cells[1::2], strict=True)]
        writer = csv.DictWriter(file := io.StringIO(), ["prompt", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        read = [row.value for row in READERS[suffix](io.BytesIO(file.getvalue().encode()), "a")]
        refused = delimiter == "\t" and "may belong to the text of several rows" in str(read[-1])
        assert refused or read == rows, file.getvalue()


@pytest.mark.parametrize(("name", "content", "texts"), ODD.values(), ids=ODD)
def test_odd_files_are_read_by_their_content(tmp_path, name, content, texts):
    (tmp_path / name).write_bytes(content)
    assert list(read_rows(tmp_path / name, answer)) == texts
    assert list(read_rows(tmp_path / name, answer)) == texts, "from the cache, where it is kept"


def test_bad_row_or_column_of_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"answer": text} for text in (b"\xfe", b"2\0", b"\xff")])
    with pytest.raises(UserError) as caught:
        read_rows(path, answer)
    (line,) = caught.value.problems
    assert line == f"{path} row 1: field 'answer': expected text, got dict; rows 2, 3 have the same problem"
    twice = pyarrow.Table.from_arrays([pyarrow.array(["1"])] * 2, names=["answer"] * 2)
    pyarrow.parquet.write_table(twice, path)
    with pytest.raises(UserError, match="parquet: the file has the column 'answer' twice; rename one of the two"):
        read_rows(path, answer)


def test_narrow_floats_of_parquet_are_their_shortest_numbers(tmp_path):
    numbers = [0.1, -2.5, 0.0001, 3.0]
    for type in (pyarrow.float16(), pyarrow.float32(), pyarrow.float64()):
        given = pyarrow.array(numbers).cast(type)
        columns = {
            "one": given,
            "known": given.dictionary_encode() if type.bit_width > 16 else given,
            "many": pyarrow.array([[number] for number in given.to_pylist()], pyarrow.list_(type)),
            "in": pyarrow.array([{"x": number} for number in given.to_pylist()], pyarrow.struct([("x", type)])),
            "map": pyarrow.array([[("x", number)] for number in given.to_pylist()], pyarrow.map_("string", type)),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{type}.parquet")
        rows = list(read_rows(tmp_path / f"{type}.parquet", dict))
        assert rows == [{"one": n, "known": n, "many": [n], "in": {"x": n}, "map": {"x": n}} for n in numbers], type


def test_json_values_of_datasets_are_what_they_hold(tmp_path):
    values = [["a", {"b": 1}], "a", 3, {"role": "user"}]
    given = pyarrow.array([json.dumps(value) for value in values], pyarrow.json_(pyarrow.string()))
    listed = pyarrow.ListArray.from_arrays([*range(len(values) + 1)], given)
    pyarrow.parquet.write_table(pyarrow.table({"one": given, "many": listed}), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet", dict)) == [{"one": value, "many": [value]} for value in values]


def test_texts_of_parquet_as_bytes_are_texts(tmp_path):
    row = {"answer": "é".encode(), "image": b"P1", "turns": [{"content": b"x", "bytes": b"y"}]}
    path = parquet(tmp_path / "a.parquet", [row])
    turns = [{"content": "x", "bytes": {"base64": "eQ=="}}]
    assert list(read_rows(path, dict)) == [{"answer": "é", "image": {"base64": "UDE="}, "turns": turns}]


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / ".hidden").mkdir()
    for number, name in enumerate(["b.jsonl", "a.jsonl", "deeper/c.jsonl", ".hidden/d.jsonl", "README.md"]):
        (tmp_path / name).write_text(f'{{"answer": "{number}"}}\n')
    rows = read_rows(tmp_path, answer)
    assert list(rows) == ["1", "0", "2"]
    assert rows.places([2, 0]) == [Place(f"{tmp_path}/deeper/c.jsonl", 1), Place(f"{tmp_path}/a.jsonl", 1)]
    assert rows[1:].fingerprint != rows.fingerprint
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path, answer)
    *problems, advice = caught.value.problems
    assert [problem.partition(":1:")[0] for problem in problems] == [f"{tmp_path}/{n}.jsonl" for n in "ab"]
    assert "if a.jsonl, b.jsonl is not data" in advice


def test_a_link_in_a_folder_loses_no_rows(tmp_path):
    data = tmp_path / "data"
    for folder, name in (("elsewhere", "a.jsonl"), ("data", "b.jsonl")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(f'{{"answer": "{folder}"}}\n')
    (data / "shard").symlink_to("../elsewhere")
    (data / "again").symlink_to("../elsewhere")
    (data / "loop").symlink_to(".")
    assert list(read_rows(data, answer)) == ["elsewhere", "data"]
    (data / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.jsonl: cannot be read \(No such file or directory\)"):
        read_rows(data, answer)


def test_notes_and_rows_left_out_survive_the_cache(tmp_path):
    content = "".join(json.dumps({"answer": text}) + "\n" for text in ["x1", "none", *"abcdefg", "x2", *["none"] * 7])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    for _ in range(2):
        rows = read_rows(tmp_path / "a.jsonl.gz", noting)
        assert list(rows) == ["x1", *"abcdefg", "x2"]
        assert rows.notes == [
            "2 rows with an x (lines 1, 10)",
            "8 rows left out: nothing to learn (lines 2, 11, 12, 13, 14, and 3 more)",
        ]
        (left_out,) = rows.left_out()
        assert left_out[:2] == ("nothing to learn", 8)
        assert left_out.places[:2] == [Place(f"{tmp_path}/a.jsonl.gz", line) for line in (2, 11)]
    (tmp_path / "b.jsonl").write_text('{"answer": "none"}\n')
    assert read_rows(tmp_path, noting).notes[1].endswith("a.jsonl.gz:14, and 4 more)")
    with pytest.raises(UserError, match=r"1 row left out: nothing to learn\n.*no row is left to use"):
        read_rows(tmp_path / "b.jsonl", noting)


def test_errors_that_name_an_example_name_its_place_too(tmp_path):
    (tmp_path / "a.csv").write_bytes(CSV)
    rows = read_rows(tmp_path / "a.csv", answer)
    lines = ["train example 2: the answer is dropped", "validation example 2: no", "of train example 2"]
    placed = f"train example 2 ({tmp_path}/a.csv:6): the answer is dropped"
    assert with_places(lines, rows, "train") == [placed, *lines[1:]]
    assert with_places(lines, TEXTS, "train") == lines


def test_row_behind_one_left_out_keeps_its_number(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"answer": "1"}, {"answer": "none"}, {"answer": "3"}]))
    assert read_rows(path, noting).places([0, 1]) == [Place(str(path), None, number) for number in (1, 3)]


def test_equal_rows_stay_together_however_they_are_written(tmp_path):
    rows = [{"answer": f"{n}", "other": n} for n in range(40)]
    turned = [dict(reversed(row.items())) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))  # without a line break at its end
    (tmp_path / "b.jsonl").write_bytes(b"".join(f" {json.dumps(row)}\r\n".encode() for row in turned))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2))
    names = ",".join(str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.json"))
    for seed in range(3):
        train, held = (set(side) for side in read_rows(names, lambda row: row["answer"]).held_out(60, seed))
        assert len(train) + len(held) == 40
        assert train
        assert held


def test_held_out_rows_are_drawn_by_group_and_seed(tmp_path):
    lines = [json.dumps({"answer": f"{n}", "group": f"{n // 3}"}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = read_rows(tmp_path / "a.jsonl", noting)
    sides = {seed: rows.held_out(30, seed) for seed in range(3)}
    for train, held_out in sides.values():
        assert sorted([*train, *held_out]) == sorted(rows)
        assert len(held_out) == 30
        assert {int(text) // 3 for text in train}.isdisjoint({int(text) // 3 for text in held_out})
        assert train.places([5])[0].line == int(train[5]) + 1
    assert len({tuple(held_out) for _, held_out in sides.values()}) == 3
    assert list(rows.held_out(30, 1)[1]) == list(sides[1][1])
    assert len({side.fingerprint for pair in sides.values() for side in pair}) == 6
    shuffled = tmp_path / "b.jsonl"
    shuffled.write_text("\n".join(reversed(lines)))
    assert set(read_rows(shuffled, noting).held_out(30, 1)[1]) == set(sides[1][1]), "by content, not by place"
    assert len(rows.held_out(1, 0)[1]) == 3, "the smallest group"
    (tmp_path / "c.jsonl").write_text("\n".join(lines[:3]))
    with pytest.raises(UserError, match="all rows are of one group, such as one prompt"):
        read_rows(tmp_path / "c.jsonl", noting).held_out(1, 0)
