import numpy as np
import pytest

from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import read_grouplens_100k, read_recbole

# Made-up rows: (user, item, rating, time).
ROWS = [(3, 20, 4, 881250949), (1, 5, 2, 881250950), (3, 5, 5, 881250951), (10, 20, 1, 881250951)]
FLAGS = {"5": {5, 8}, "20": {0}}


def write_grouplens(folder, extras=True):
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in ROWS))
    if extras:
        lines = []
        for item, title in (("5", "Caf\xe9, Le (1991)"), ("20", "unknown")):
            flags = "|".join("1" if place in FLAGS[item] else "0" for place in range(19))
            lines.append(f"{item}|{title}|01-Jan-1991||http://example.org|{flags}\n")
        (folder / "u.item").write_bytes("".join(lines).encode("latin-1"))
        (folder / "u.user").write_text("1|24|M|writer|85711\n3|40|F|other|T8H1N\n10|33|F|artist|05201\n")


def write_recbole(folder, extras=True):
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    rows = "".join("\t".join(map(str, row)) + "\n" for row in ROWS)
    (folder / "ml-100k.inter").write_text(header + rows)
    if extras:
        (folder / "ml-100k.item").write_text(
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
            "5\tCaf\xe9, Le\t1991\tDrama Comedy\n20\tunkonwn\tunkonwn\tunknown\n",
            encoding="utf-8",
        )
        (folder / "ml-100k.user").write_text(
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
            "1\t24\tM\twriter\t85711\n3\t40\tF\tother\tT8H1N\n10\t33\tF\tartist\t05201\n"
        )


def test_grouplens_form_with_a_latin_1_title(tmp_path):
    write_grouplens(tmp_path)
    assert b"\xe9" in (tmp_path / "u.item").read_bytes()
    data = read_grouplens_100k(tmp_path)
    assert data.user_ids.tolist() == ["1", "3", "10"]
    assert data.item_ids.tolist() == ["5", "20"]
    assert data.users.tolist() == [1, 0, 1, 2]
    assert data.items.tolist() == [1, 0, 0, 1]
    assert data.ratings.tolist() == [4, 2, 5, 1]
    assert data.timestamps.tolist() == [881250949, 881250950, 881250951, 881250951]
    assert data.item_titles.tolist() == ["Café, Le (1991)", "unknown"]
    assert data.item_genres == (("Comedy", "Drama"), ("unknown",))
    assert data.user_columns["zip_code"].tolist() == ["85711", "T8H1N", "05201"]


@pytest.mark.parametrize(
    ("write", "read"),
    [(write_grouplens, read_grouplens_100k), (write_recbole, lambda folder: read_recbole(folder, "ml-100k"))],
)
def test_title_files_may_be_absent(tmp_path, write, read):
    write(tmp_path, extras=False)
    data = read(tmp_path)
    assert len(data) == 4
    assert (data.item_titles, data.item_genres, data.user_columns) == (None, None, {})


def test_both_forms_give_the_same_rows(tmp_path):
    write_grouplens(tmp_path)
    write_recbole(tmp_path)
    one, two = read_grouplens_100k(tmp_path), read_recbole(tmp_path, "ml-100k")
    assert one.fingerprint() == two.fingerprint()
    assert np.array_equal(one.ratings, two.ratings)
    assert np.array_equal(one.user_columns["zip_code"], two.user_columns["zip_code"])


INTER = "user_id:token\titem_id:token\t{market}:token\n1\t5\tus\n1\t5\tde\n3\t20\tus\n"


@pytest.mark.parametrize("column", ["market", "market_id"])
def test_recbole_markets_of_rows(tmp_path, column):
    (tmp_path / "x.inter").write_text(INTER.format(market=column))
    (tmp_path / "x.user").write_text("user_id:token\tmarket:token\tzip_code:token\n1\tfr\t05201\n3\tfr\t85711\n")
    data = read_recbole(tmp_path, "x")
    assert data.user_ids.tolist() == ["de/1", "us/1", "us/3"]
    assert data.user_markets.tolist() == ["de", "us", "us"]
    assert data.user_columns["zip_code"].tolist() == ["05201", "05201", "85711"]


@pytest.mark.parametrize("column", ["market", "market_id"])
def test_recbole_markets_of_users(tmp_path, column):
    write_recbole(tmp_path)
    plain = read_recbole(tmp_path, "ml-100k")
    (tmp_path / "ml-100k.user").write_text(f"user_id:token\t{column}:token\n1\tus\n3\tde\n10\tus\n11\tfr\n")
    data = read_recbole(tmp_path, "ml-100k")
    assert data.user_ids.tolist() == plain.user_ids.tolist() == ["1", "3", "10"]
    assert data.user_markets.tolist() == ["us", "de", "us"]
    assert plain.user_markets is None


def test_recbole_users_without_a_market_are_refused(tmp_path):
    write_recbole(tmp_path)
    (tmp_path / "ml-100k.user").write_text("user_id:token\tmarket:token\n1\tus\n3\tde\n")
    with pytest.raises(DataError, match=r"ml-100k\.user: 1 users of ml-100k\.inter are not there"):
        read_recbole(tmp_path, "ml-100k")
    (tmp_path / "ml-100k.user").write_text("user_id:token\tmarket:token\n1\tus\n3\t\n10\tus\n")
    with pytest.raises(DataError, match=r"ml-100k\.user, line 3, column 'market': the name is empty"):
        read_recbole(tmp_path, "ml-100k")
    (tmp_path / "ml-100k.user").write_text("user_id:token\tmarket:token\n1\tus\n3\tus\n10\tus\n3\tde\n")
    with pytest.raises(DataError, match=r"ml-100k\.user, line 5: the same user has another market in a line above"):
        read_recbole(tmp_path, "ml-100k")
    (tmp_path / "x.inter").write_text(INTER.format(market="market").replace("de", " "))
    with pytest.raises(DataError, match=r"x\.inter, line 3, column 'market': the name is empty"):
        read_recbole(tmp_path, "x")


def test_windows_line_ends_byte_order_mark_and_blank_lines_change_nothing(tmp_path):
    write_recbole(tmp_path)
    plain = read_recbole(tmp_path, "ml-100k")
    path = tmp_path / "ml-100k.inter"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert read_recbole(tmp_path, "ml-100k").fingerprint() == plain.fingerprint()


def test_a_catalogue_file_adds_items_that_no_row_names(tmp_path):
    write_recbole(tmp_path)
    with (tmp_path / "ml-100k.item").open("a") as file:
        file.write("6\tUnseen\t1990\tDrama\n")
    data = read_recbole(tmp_path, "ml-100k")
    assert data.item_ids.tolist() == ["5", "6", "20"]
    assert data.items.tolist() == [2, 0, 0, 2]


def test_recbole_columns_are_found_by_name_and_may_be_absent(tmp_path):
    (tmp_path / "a.inter").write_text("item_id:token\tuser_id:token\n7\tx\n8\tx\n")
    data = read_recbole(tmp_path, "a")
    assert data.item_ids[data.items].tolist() == ["7", "8"]
    assert data.user_ids.tolist() == ["x"]
    assert data.ratings is None
    assert data.timestamps is None


def test_times_written_as_floats_are_exact(tmp_path):
    (tmp_path / "a.inter").write_text(
        "user_id:token\titem_id:token\ttimestamp:float\n1\t1\t881250949.0\n1\t2\t8.8125095e8\n"
    )
    assert read_recbole(tmp_path, "a").timestamps.tolist() == [881250949, 881250950]


HEADER = b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.inter is empty"),
        (b" \n\n", "a.inter is empty"),
        (b"PK\x03\x04\x00\x00" * 9, "not a text file"),
        (HEADER + b"1\t2\t3\t4\n1\tcaf\xe9\t3\t4\n", "line 3: not utf-8"),
        (HEADER + b"1\t2\t3\t4\n1\t2\t3\n", "line 3: 4 columns expected, 3 found"),
        (HEADER + b"1\t2\t3\t4\n1\t3\tnan\t4\n", "line 3, column 'rating'.*'nan'"),
        (HEADER + b"1\t2\tfive\t4\n", "line 2, column 'rating'.*'five'"),
        (HEADER + b"1\t2\t5\tnoon\n", "line 2, column 'timestamp'"),
        (HEADER + b"1\t2\t5\t4.5\n", "line 2, column 'timestamp'.*whole"),
        (HEADER + b"1\t\t5\t4\n", "line 2, column 'item_id': the id is empty"),
        (HEADER, "no interactions"),
        (b"user_id:token\tthing:token\n1\t2\n", "line 1: there is no column 'item_id' .*user_id, thing"),
        (b"1\t2\t3\t4\n", "line 1: not the header"),
    ],
)
def test_unusable_files_are_named_with_line_and_column(tmp_path, content, message):
    (tmp_path / "a.inter").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_recbole(tmp_path, "a")


def test_a_folder_or_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.inter does not exist"):
        read_recbole(tmp_path, "a")
    (tmp_path / "u.data").mkdir()
    with pytest.raises(DataError, match=r"u\.data is a folder"):
        read_grouplens_100k(tmp_path)
