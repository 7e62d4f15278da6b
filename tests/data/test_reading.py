"""Delimited text in all its forms: the same rows come back, and what is damaged is named or counted."""

import bz2
import csv
import datetime
import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import ReadOptions, read_data
from fedhur_app.data.reading import sources
from fedhur_app.data.reading.columns import find_columns
from fedhur_app.data.reading.dialect import find_dialect, is_header

ROWS = [
    ("3", "20", "4", "881250949"),
    ("1", "5", "2", "881250950"),
    ("3", "5", "5", "881250951"),
    ("10", "20", "1", "881250951"),
    ("1", "7", "3.5", "881250951"),
]


def content(data):
    """Rows with the original ids."""
    rows = [data.user_ids[data.users].tolist(), data.item_ids[data.items].tolist()]
    rows += [[] if column is None else column.tolist() for column in (data.ratings, data.timestamps)]
    return rows


def read(path, **options):
    return read_data(path, "x", ReadOptions(**options))


def text_of(rows, separator, quote="", header=None):
    lines = [header] if header else []
    lines += rows
    return "".join(separator.join(f"{quote}{cell}{quote}" for cell in line) + "\n" for line in lines)


EXPECTED = [
    ["3", "1", "3", "10", "1"],
    ["20", "5", "5", "20", "7"],
    [4, 2, 5, 1, 3.5],
    [881250949, 881250950, 881250951, 881250951, 881250951],
]
HEADERS = [
    None,
    ("userId", "movieId", "rating", "timestamp"),
    ("user_id", "item_id", "rating", "timestamp"),
    ("user_id:token", "item_id:token", "rating:float", "timestamp:float"),
    ("User-ID", "ISBN", "Book-Rating", "Date"),
    ("UserID", "MovieID", "Rating", "Timestamp"),
    ("USER", "ITEM", "STARS", "TIME"),
    ("reviewerID", "asin", "overall", "unixReviewTime"),
    ("uid", "iid", "score", "ts"),
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(
    ("separator", "quote"),
    [
        ("\t", ""),
        (",", ""),
        ("::", ""),
        (";", '"'),
        (";", ""),
        ("|", ""),
        (" ", ""),
        (",", '"'),
        ("\t", '"'),
        ("  ", ""),
    ],
)
def test_separators_quotes_and_headers_change_nothing(tmp_path, separator, quote, header):
    (tmp_path / "r.txt").write_text(text_of(ROWS, separator, quote, header))
    data, taken = read(tmp_path / "r.txt")
    assert content(data) == EXPECTED
    assert (data.n_users, data.n_items) == (3, 3)
    (tally,) = taken.tallies
    assert (tally.read, tally.header, tally.rows) == (5 + bool(header), int(bool(header)), 5)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "\n\n  \n"])
def test_encodings_line_ends_and_blank_lines_change_nothing(tmp_path, encoding, line_end, last):
    rows = [("Zoë", "é1", "3"), ("Bob", "b2", "5")]
    text = text_of(rows, ",", header=("user", "item", "rating")).removesuffix("\n") + last
    (tmp_path / "r.csv").write_bytes(text.replace("\n", line_end).encode(encoding))
    data, _ = read(tmp_path / "r.csv")
    assert content(data)[:3] == [["Zoë", "Bob"], ["é1", "b2"], [3, 5]]


def test_latin_1_may_show_only_in_the_last_line(tmp_path):
    lines = ["user,item"] + [f"{n},{n % 7}" for n in range(30000)]
    (tmp_path / "r.csv").write_bytes("\n".join([*lines, "caf\xe9,1"]).encode("latin-1"))
    data, taken = read(tmp_path / "r.csv")
    assert taken.form["encoding"] == "Latin-1"
    assert "café" in data.user_ids


@pytest.mark.parametrize("kind", ["gz", "bz2", "zip", "zip with a readme", "gz in zip"])
def test_compressed_files(tmp_path, kind):
    text = text_of(ROWS, ",", header=HEADERS[1]).encode()
    path = tmp_path / f"r.{kind.split()[0]}"
    if kind == "gz":
        path.write_bytes(gzip.compress(text))
    elif kind == "bz2":
        path.write_bytes(bz2.compress(text))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/ratings.csv", text)
            if "readme" in kind:
                archive.writestr("data/README.txt", "about")
                archive.writestr("data/movies.csv", "movieId,title,genres\n5,Five,Drama|War\n")
    if kind == "gz in zip":
        path.write_bytes(gzip.compress(text))
    data, _ = read(path)
    assert content(data) == EXPECTED
    if "readme" in kind:  # the archive is a folder: the titles lie beside
        assert data.item_titles.tolist() == ["Five", "", ""]


def test_of_an_archive_without_an_obvious_file_the_members_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "r.zip", "w") as archive:
        archive.writestr("one.csv", "1,2\n")
        archive.writestr("two.csv", "1,2\n")
    with pytest.raises(DataError, match=r"r\.zip: which of its 2 files.*one\.csv, two\.csv"):
        read(tmp_path / "r.zip")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_a_cut_archive_is_damaged(tmp_path, compress):
    whole = compress(text_of([(str(n), str(n * 7919 % 1000)) for n in range(5000)], ",").encode())
    (tmp_path / "r").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or cannot be unpacked"):
        read(tmp_path / "r")


@pytest.mark.parametrize(
    ("first", "rows", "expected"),
    [
        (["userId", "movieId"], [["1", "2"]], True),
        (["user", "thing"], [["ann", "x"]], True),
        (["who", "what", "stars"], [["ann", "x", "3"], ["bob", "y", "4"]], True),
        (["u1", "i1", "five"], [["u2", "i9", "3"], ["u3", "i2", "4"]], False),  # data, and a damaged rating
        (["u1", "i1", "nan"], [["u2", "i9", "3"], ["u3", "i2", "4"]], False),
        (["u1", "i1", ""], [["u2", "i9", "3"]], False),
        (["ann", "matrix", "3"], [["bob", "alien", "4"]], False),
        (["ann", "matrix"], [["bob", "alien"]], False),
        (["196", "242"], [["1", "2"]], False),
        (["034545104X", "ann"], [["0440234743", "bob"]], False),
        (["user", "user"], [["1", "2"]], False),
    ],
)
def test_the_rule_for_headers(first, rows, expected):
    assert is_header(first, rows) is expected


def test_a_column_that_people_name_makes_a_header(tmp_path):
    (tmp_path / "r.csv").write_text("who,what\nann,matrix\nbob,alien\n")
    data, _ = read(tmp_path / "r.csv", user_col="who", item_col="what")
    assert content(data)[:2] == [["ann", "bob"], ["matrix", "alien"]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)])
def test_without_a_header_rating_and_time_are_told_by_content(tmp_path, order):
    (tmp_path / "r.csv").write_text(text_of([[row[place] for place in order] for row in ROWS], ","))
    assert content(read(tmp_path / "r.csv")[0]) == EXPECTED


def test_the_columns_of_files_without_header():
    def found(*rows, given=None):
        return find_columns("f", None, rows, given or {}, len(rows[0]))

    assert found(("1", "2")) == {"user": 0, "item": 1}
    assert found(("1", "2", "4.5")) == {"user": 0, "item": 1, "rating": 2}
    assert found(("1", "2", "881250949")) == {"user": 0, "item": 1, "time": 2}
    assert found(("1", "2", "5", "17")) == {"user": 0, "item": 1, "rating": 2, "time": 3}
    assert found(("1", "2", "5", "2001-09-11")) == {"user": 0, "item": 1, "rating": 2, "time": 3}
    assert found(("1", "2", "text", "5")) == {"user": 0, "item": 1, "rating": 3}
    assert found(("1", "2", "5"), given={"user": "2", "item": "1"}) == {"user": 1, "item": 0, "rating": 2}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("name,item\n1,2\n", {}, r"line 1: there is no column for the user \(found: name, item\).*--user-col"),
        ("user,thing\n1,2\n", {}, r"line 1: there is no column for the item .*--item-col"),
        ("user,item\n1,2\n", {"rating_col": "stars"}, r"no column 'stars' for --rating-col \(found: user, item\)"),
        ("1,2\n3,4\n", {"time_col": "5"}, "no column '5' for --time-col .*number from 1 to 2"),
        ("user,item\n1,2\n", {"user_col": "item", "item_col": "2"}, "one column was given two roles"),
        ("just some words\nthat are no table,\nat all\n", {}, "--format"),
        ("one\ntwo\n", {}, "no separator found"),
    ],
)
def test_missing_columns_are_named(tmp_path, text, options, message):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "r.csv", **options)
    assert "r.csv" in str(caught.value)


def test_columns_may_be_named_also_by_number_and_the_others_are_shown(tmp_path):
    (tmp_path / "r.csv").write_text("id,user,film,rating,stars\n9,a,x,1,5\n8,b,y,2,4\n")
    data, taken = read(tmp_path / "r.csv", rating_col="stars", item_col="3")
    assert content(data)[:3] == [["a", "b"], ["x", "y"], [5, 4]]
    assert taken.columns == {"user": "user", "item": "film", "rating": "stars"}
    assert taken.unused == ["id", "rating"]


@pytest.mark.parametrize(
    ("cell", "seconds"),
    [
        ("881250949", 881250949),
        ("881250949.0", 881250949),
        ("8.8125095e8", 881250950),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no float64
        ("1668000000123", 1668000000123),
        ("-5", -5),
        ("1997-12-04", 881193600),
        ("1997-12-04 15:55:49", 881250949),
        ("1997-12-04T15:55:49", 881250949),
        ("1997-12-04T16:55:49+01:00", 881250949),
        ("1997-12-04T15:55:49Z", 881250949),
    ],
)
def test_times_are_exact(tmp_path, cell, seconds):
    (tmp_path / "r.csv").write_text(f"user,item,time\n1,2,{cell}\n1,3,{cell}\n")
    assert read(tmp_path / "r.csv")[0].timestamps.tolist() == [seconds] * 2


def test_ids_stay_what_they_are(tmp_path):
    (tmp_path / "r.csv").write_text("user,isbn\n01,034545104X\n1,0440234743\n1, 9 \n")
    data, _ = read(tmp_path / "r.csv")
    assert content(data)[:2] == [["01", "1", "1"], ["034545104X", "0440234743", "9"]]


HEAD = "user,item,rating,time\n"


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("7,8,nan,5", "line 3, column 'rating': the rating is not a finite number"),
        ("7,8,-inf,5", "line 3, column 'rating'"),
        ("7,8,,5", "line 3, column 'rating': the rating is empty"),
        ("7,8,five,5", "line 3, column 'rating': not a finite number"),
        ("7,8,1e300,5", "line 3, column 'rating'"),  # infinite in float32
        ("7,8,3,noon", "line 3, column 'time': not a whole number"),
        ("7,8,3,4.5", "line 3, column 'time'"),
        ("7,8,3,1e999999999", "line 3, column 'time'"),
        ("7,8,3,", "line 3, column 'time': the time is empty"),
        ("7,8,3,99999999999999999999", "line 3, column 'time'"),
        (",8,3,5", "line 3, column 'user': the id is empty"),
        ("7,  ,3,5", "line 3, column 'item': the id is empty"),
        ("7\0,8,3,5", "line 3, column 'user': the id holds a zero byte"),
        ("7," + "9" * 5000 + ",3,5", "line 3, column 'item': the id is longer than 1000 bytes"),
        ("7,8,3", "line 3: 4 columns expected, 3 found"),
        ("7,8,3,5,6", "line 3: 4 columns expected, 5 found"),
        ('7,"8,3,5', "line 3: the quotes do not fit"),
        ('7,"8"x,3,5', "line 3: the quotes do not fit"),
    ],
)
def test_damaged_lines_are_named_or_counted(tmp_path, line, where):
    (tmp_path / "r.csv").write_text(HEAD + "1,2,3,4\n" + line + "\n5,6,3,4\n")
    with pytest.raises(DataError, match=f"r.csv, {where}.*--on-bad-line skip"):
        read(tmp_path / "r.csv")
    data, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    assert content(data)[:2] == [["1", "5"], ["2", "6"]]
    (tally,) = taken.tallies
    assert (tally.read, tally.header, tally.rows, tally.n_bad) == (4, 1, 2, 1)
    assert len(tally.first_bad) == 1
    assert tally.first_bad[0].startswith(where.split(":")[0])


def test_ten_per_cent_of_damaged_lines_are_counted_by_reason(tmp_path):
    lines = [f"{n},{n % 5},{n % 5},{n}" for n in range(1000)]
    lines[::20] = ["1,2"] * 50
    lines[10::20] = ["1,2,x,4"] * 50
    (tmp_path / "r.csv").write_text(HEAD + "\n".join(lines))
    data, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    assert len(data) == 900
    assert taken.tallies[0].bad == {"4 columns expected, 2 found": 50, "rating: not a finite number": 50}
    assert [each.split(":")[0] for each in taken.tallies[0].first_bad][:2] == ["line 2", "line 12, column 'rating'"]


def test_when_most_lines_are_damaged_the_format_is_wrong(tmp_path):
    (tmp_path / "r.csv").write_text(HEAD + "1,2,3,4\n" + "5,6,x,4\n" * 3)
    with pytest.raises(DataError, match=r"3 of 4 lines are damaged.*another format"):
        read(tmp_path / "r.csv", on_bad_line="skip")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\r\n\t\n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        ("\n".encode("utf-16"), "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not a text file: it is a picture"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 50, "not a text file"),
        (b"user,item\n", "there are no interactions"),
        (b"user,item\n\n\n", "there are no interactions"),
        (b"\xff\xfeu\0s", "not utf-16 text"),
        (b"\xef\xbb\xbfuser,item\n1,\xe9\n", "line 2: not utf-8"),
    ],
)
def test_files_that_are_no_table(tmp_path, data, message):
    (tmp_path / "r.csv").write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "r.csv")
    assert "r.csv" in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        read(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"is a folder with nothing in it"):
        read(tmp_path)


def test_the_only_file_of_a_folder_is_read_whatever_it_is_called(tmp_path):
    (tmp_path / "mine.csv").write_text("user,item\na,x\n")
    (tmp_path / ".hidden").write_text("")
    assert len(read(tmp_path)[0]) == 1
    (tmp_path / "another.csv").write_text("user,item\na,x\n")
    with pytest.raises(
        DataError, match=r"without a known file .*: give one of its files \(another.csv, mine.csv\) itself"
    ):
        read(tmp_path)


def test_messages_hold_no_ids(tmp_path):
    (tmp_path / "r.csv").write_text(HEAD + "1,2,3,4\nsecret-user,8,secret-item,5\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "r.csv")
    assert "secret" not in str(caught.value)


def test_a_quoted_cell_may_hold_separators_quotes_and_line_ends(tmp_path):
    (tmp_path / "r.csv").write_text(
        'user,review,item,rating\n"a, b","so ""good""\nreally\n",x,5\nc,,y,4\n"d","one\n\ntwo",z,3\n'
    )
    data, taken = read(tmp_path / "r.csv")
    assert content(data)[:3] == [["a, b", "c", "d"], ["x", "y", "z"], [5, 4, 3]]
    (tally,) = taken.tallies
    assert (tally.read, tally.header, tally.rows, tally.continued) == (8, 1, 3, 4)


def test_a_quote_too_many_costs_one_line(tmp_path):
    (tmp_path / "r.csv").write_text('user,item\n1,2\n3,"4\n5,6\n7,8\n"9","10"\n')
    data, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    assert content(data)[:2] == [["1", "5", "7", "9"], ["2", "6", "8", "10"]]
    assert taken.tallies[0].n_bad == 1


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_change_nothing(tmp_path, monkeypatch, size):
    lines = [
        "user,item,note",
        *(f'{n},{n % 7},"é, ""{n}"" \n or so"' if n % 3 else f"{n},{n % 7},x" for n in range(40)),
        "\n",
        "a,b",
    ]
    (tmp_path / "r.csv").write_text("\n".join(lines), encoding="utf-8")
    whole, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    batches = sources.Text.batches
    monkeypatch.setattr(sources.Text, "batches", lambda text: batches(text, size))
    parts, counted = read(tmp_path / "r.csv", on_bad_line="skip")
    assert content(parts) == content(whole)
    assert counted.tallies[0].as_card() == taken.tallies[0].as_card()
    assert taken.tallies[0].n_bad == 1


_ids = st.one_of(st.integers(0, 20).map(str), st.text("aé漢'\",;|:-\\09", min_size=1, max_size=5))


@settings(max_examples=40)
@given(data=st.data())
def test_what_was_written_comes_back(tmp_path_factory, data):
    """Random interactions in a random form."""
    rows = data.draw(
        st.lists(
            st.tuples(_ids, _ids, st.integers(0, 20).map(lambda half: half / 2), st.integers(10**8, 2 * 10**9)),
            min_size=1,
            max_size=12,
            unique_by=lambda row: row[:2],
        )
    )
    separator = data.draw(st.sampled_from(["\t", ",", ";", "|"]))
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
    order = data.draw(st.permutations(range(4)))
    header = [("user_id", "item_id", "rating", "timestamp")[place] for place in order]
    file = io.StringIO()
    writer = csv.writer(
        file,
        delimiter=separator,
        quoting=data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
        lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])),
    )
    writer.writerow(header)
    writer.writerows([row[place] for place in order] for row in rows)
    written = file.getvalue().encode(encoding)
    path = tmp_path_factory.mktemp("fuzz") / "r.csv"
    path.write_bytes(data.draw(st.sampled_from([bytes, gzip.compress, bz2.compress]))(written))
    result, taken = read(path)
    assert content(result) == [list(column) for column in zip(*rows, strict=True)]
    assert taken.rows == len(rows)


def attempt(path, policy):
    """What was read, None after an error that names the file; any other error fails the test."""
    try:
        return read(path, on_bad_line=policy)
    except DataError as error:
        if path.name not in str(error):
            raise
        return None


_damage = st.sampled_from(["byte", "cut", "zero", "swap", "quote", "newline"])


@settings(max_examples=150)
@given(
    lines=st.integers(3, 25),
    separator=st.sampled_from([",", "\t", "::", ";", " "]),
    quoted=st.booleans(),
    headed=st.booleans(),
    damages=st.lists(st.tuples(_damage, st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
    policy=st.sampled_from(["error", "skip"]),
)
def test_damage_is_an_error_or_counted(tmp_path_factory, lines, separator, quoted, headed, damages, policy):
    quote = '"' if quoted and separator != "::" else ""
    rows = [(f"{n * 7 % 11}", f"i{n}", f"{n % 5}", f"{881250949 + n}") for n in range(lines)]
    content = bytearray(text_of(rows, separator, quote, HEADERS[1] if headed else None).encode())
    for kind, where, value in damages:
        place = where % max(len(content), 1)
        if kind == "byte":
            content[place : place + 1] = bytes([value])
        elif kind == "cut":
            del content[place : place + value % 9]
        elif kind == "zero":
            content.insert(place, 0)
        elif kind == "quote":
            content.insert(place, 34)
        elif kind == "newline":
            content.insert(place, 10)
        else:
            cells = bytes(content).split(b"\n")
            parts = cells[where % len(cells)].split(separator.encode())
            cells[where % len(cells)] = separator.encode().join(reversed(parts))
            content = bytearray(b"\n".join(cells))
    path = tmp_path_factory.mktemp("fuzz") / "r.csv"
    path.write_bytes(content)
    found = attempt(path, policy)
    if found is None:
        return
    data, taken = found
    (tally,) = taken.tallies
    assert tally.read == tally.header + tally.blank + tally.without + tally.continued + tally.rows + tally.n_bad
    assert tally.read in (bytes(content).count(b"\n"), bytes(content).count(b"\n") + 1)
    if taken.format == "csv":
        assert taken.rows == tally.rows
    assert taken.rows == len(data) + sum(taken.dropped.values())
    assert np.isfinite(data.ratings).all() if data.ratings is not None else True


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_error_or_a_table(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "r.csv"
    path.write_bytes(data)
    if found := attempt(path, "skip"):
        assert found[1].rows == len(found[0]) + sum(found[1].dropped.values())


def test_the_separator_is_the_one_that_divides_all_lines_alike():
    assert find_dialect("f", ["1;2;3,5", "4;5;6,25"]).separator == ";"
    assert find_dialect("f", ["a,b,2001-01-01 10:00:00"] * 3).separator == ","
    assert find_dialect("f", ["1::Heat (1995), a film::Action|Crime"] * 2).separator == "::"
    # Damage in one line of nine hides nothing.
    assert find_dialect("f", [*["1,2,2001-01-01 10:00:00"] * 9, "1 2"]).separator == ","


def test_parquet_keeps_whole_numbers_and_reads_dates(tmp_path):
    table = pl.DataFrame(
        {
            "user_id": [2**60 + 1, 5, 5],
            "item_id": ["b", "a", "b"],
            "rating": [1.5, None, 3.0],
            "timestamp": [datetime.datetime(1997, 12, 4, 15, 55, 49)] * 3,
        }
    )
    table.write_parquet(tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"r\.parquet, row 2, column 'rating': the rating is empty"):
        read(tmp_path / "r.parquet")
    data, taken = read(tmp_path / "r.parquet", on_bad_line="skip")
    assert taken.format == "parquet"
    assert content(data) == [[str(2**60 + 1), "5"], ["b", "b"], [1.5, 3], [881250949] * 2]


def test_parquet_of_another_kind_is_refused(tmp_path):
    pl.DataFrame({"user": [1.5], "item": [2]}).write_parquet(tmp_path / "r.parquet")
    with pytest.raises(DataError, match="column 'user': ids must be integers or text"):
        read(tmp_path / "r.parquet")
    whole = (tmp_path / "r.parquet").read_bytes()
    (tmp_path / "r.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        read(tmp_path / "r.parquet")
    (tmp_path / "r.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError, match="damaged or is not a Parquet file"):
        read(tmp_path / "r.csv", format="parquet")


@pytest.mark.parametrize(
    "text",
    [
        ",user_id,item_id\n0,7,70\n1,8,80\n",  # the index of pandas
        "user_id,item_id,,\n7,70,,\n8,80,,\n",  # the separators of a spreadsheet
    ],
)
def test_a_header_may_have_cells_without_a_name(tmp_path, text):
    (tmp_path / "r.csv").write_text(text)
    data, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    assert content(data)[:2] == [["7", "8"], ["70", "80"]]
    assert taken.tallies[0].n_bad == 0
    assert taken.unused == (["1"] if text.startswith(",") else ["3", "4"])


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
@pytest.mark.parametrize(
    "text",
    [
        '"user","item"\n"1","7","70"\n"2","8","80"\n"3","8","81"\n',  # R gives its row names no name
        "# exported by x, at y\nuser,item\n7,70\n8,80\n",
        "# exported\nuser,item\n7,70\n8,80\n",
        "user,user,item\n7,a,70\n8,b,80\n",
        "user,item,2020\nann,a,1\nbob,b,2\n",
        "item_id,title\np,A,\nq,B,\nr,C,\n",
    ],
)
def test_names_of_columns_never_become_ids(tmp_path, text, on_bad_line):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(DataError, match=r"r.csv: one of the first lines names columns \(.*cannot be the header"):
        read(tmp_path / "r.csv", on_bad_line=on_bad_line)


def test_words_that_are_names_of_columns_may_be_ids(tmp_path):
    (tmp_path / "r.csv").write_text("user,song\nann,game\nuser,book\nuser,title\n")
    assert content(read(tmp_path / "r.csv")[0])[:2] == [["ann", "user", "user"], ["game", "book", "title"]]


CHECK_INS = "0\t2010-10-19T23:55:27Z\t30.23\t-97.7\t22847\n1\t2010-10-18T22:17:43Z\t30.26\t-97.7\t420315\n"


def test_dates_are_not_taken_for_items(tmp_path):
    (tmp_path / "r.txt").write_text(CHECK_INS)
    with pytest.raises(DataError, match=r"column 2 would be the item, but it holds dates; .*--item-col"):
        read(tmp_path / "r.txt")
    data, _ = read(tmp_path / "r.txt", item_col="5")
    assert content(data)[:2] == [["0", "1"], ["22847", "420315"]]
    assert data.timestamps.tolist() == [1287532527, 1287440263]


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_header_that_comes_again_is_no_user(tmp_path, quote):
    lines = ["user,item", "7,70", "user,item", "8,80", "user,71"]  # two files, one after the other
    (tmp_path / "r.csv").write_text("\n".join(quote + line.replace(",", f"{quote},{quote}") + quote for line in lines))
    with pytest.raises(DataError, match=r"r.csv, line 3: the header again"):
        read(tmp_path / "r.csv")
    data, taken = read(tmp_path / "r.csv", on_bad_line="skip")
    assert content(data)[:2] == [["7", "8", "user"], ["70", "80", "71"]]
    assert taken.tallies[0].bad == {"the header again": 1}


def test_utf_8_with_a_damaged_byte_is_not_latin_1(tmp_path):
    good = "user,item\nAndré,Amélie\nZoë,Léon\n".encode()
    (tmp_path / "r.csv").write_bytes(good + b"Ren\xe9,Amelie\n")
    with pytest.raises(DataError, match=r"r.csv, line 4: not UTF-8 text, though other lines are"):
        read(tmp_path / "r.csv")
    (tmp_path / "r.csv").write_bytes(b"user,item\nRen\xe9,Am\xe9lie\nZo\xeb,\xc3\xa9\n")
    data, taken = read(tmp_path / "r.csv")
    assert taken.form["encoding"] == "Latin-1"
    assert content(data)[:2] == [["René", "Zoë"], ["Amélie", "Ã©"]]


@pytest.mark.parametrize(("start", "what"), [("[", "one JSON array"), ("{'user': 'a'", "no objects in JSON")])
def test_json_that_is_not_lines_of_objects_is_named(tmp_path, start, what):
    (tmp_path / "r.json").write_text(f'{start}\n{{"user": "a", "item": "p"}}\n]' if start == "[" else start + "}\n")
    with pytest.raises(DataError, match=what):
        read(tmp_path / "r.json")


def test_files_of_items_and_users_that_know_nobody_are_errors(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\n1,10\n2,11\n")
    (tmp_path / "i.csv").write_text("id,title\n11,A\n12,B\n")
    (tmp_path / "u.csv").write_text("user_id,age\n01,30\n02,31\n")
    _, taken = read(tmp_path / "r.csv", items=tmp_path / "i.csv")
    assert list(taken.known.values()) == ["1 of 2 items are there"]
    with pytest.raises(DataError, match=r"u.csv: none of the 2 users of .*r.csv is there"):
        read(tmp_path / "r.csv", users=tmp_path / "u.csv")


def test_a_workbook_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "r.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<x/>")
        archive.writestr("xl/worksheets/sheet1.xml", "<x/>")
    with pytest.raises(DataError, match=r"a workbook .*: save the table as CSV"):
        read(tmp_path / "r.xlsx")


def test_a_decimal_comma_is_named(tmp_path):
    (tmp_path / "r.csv").write_text("user;item;rating\n1;2;2,5\n")
    with pytest.raises(DataError, match=r"line 2, column 'rating': not a finite number \(2,5 has to be 2.5\)"):
        read(tmp_path / "r.csv")


@pytest.mark.parametrize("option", [{"user_col": "a"}, {"items": Path("i.csv")}, {"users": Path("u.csv")}])
def test_arrays_take_no_options_of_tables(tmp_path, option):
    np.savez(tmp_path / "r.npz", user=[1], item=[2])
    with pytest.raises(
        DataError, match=rf"r.npz holds arrays .*--{next(iter(option)).replace('_', '-')} cannot be used"
    ):
        read(tmp_path / "r.npz", **option)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"user": np.array(["a", "b"], dtype=object)}, "r.npz: an array holds Python objects, .*dtype=str"),
        ({"user": np.array([1.0, 2.0])}, "r.npz: user ids must be integers or text"),
        ({"split": np.array([0, 3])}, "r.npz: row 1: the split is 3"),
    ],
)
def test_messages_about_arrays_name_the_file(tmp_path, arrays, message):
    np.savez(tmp_path / "r.npz", **{"user": np.array([1, 2]), "item": np.array([1, 2])} | arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "r.npz")


def test_a_column_of_parts_is_the_published_split(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("user,item,split\na,x,train\na,y,Validation\nb,x,test\n")
    data, taken = read(path)
    assert data.labels.tolist() == [0, 1, 2]
    assert taken.columns["split"] == "split"
    path.write_text("user,item,split\na,x,1\na,y,2\n")  # folds
    data, taken = read(path)
    assert data.labels is None
    assert taken.unused == ["split"]
    path.write_text("user,item,part\na,x,train\na,y,dev\nb,x,hold-out\n")
    assert read(path)[0].labels is None
    with pytest.raises(DataError, match=r"line 4, column 'part': no part of a split; they are called train"):
        read(path, split_col="part")
    data, _ = read(path, split_col="part", on_bad_line="skip")
    assert data.labels.tolist() == [0, 1]
    pl.DataFrame({"user": ["a", "b"], "item": [1, 2], "split": ["test", "train"]}).write_parquet(tmp_path / "r.parquet")
    assert read(tmp_path / "r.parquet", split_col="split")[0].labels.tolist() == [2, 0]
