"""Formats in which data sets are published, filters, and data sets that people imported."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedhur_app import cli
from fedhur_app.config import ConfigError, data_sets, load_settings
from fedhur_app.data import importing, movielens
from fedhur_app.data.catalog import fetch, imported, load_dataset
from fedhur_app.data.errors import DataError
from fedhur_app.data.importing import ImportOptions, check_name, import_file, k_core, save_imported
from fedhur_app.data.interactions import from_raw, subset
from fedhur_app.data.reading import sources
from fedhur_app.data.store import read_card


def take(path, **options):
    return import_file(path, "mine", ImportOptions(**options))


def rows(data):
    found = [data.user_ids[data.users].tolist(), data.item_ids[data.items].tolist()]
    return found + [None if column is None else column.tolist() for column in (data.ratings, data.timestamps)]


# --- formats

ML_1M = "1::1193::5::978300760\n2::661::3::978302109\n1::661::3::978301968\n"


@pytest.mark.parametrize("given", ["folder", "file", "folder above"])
def test_movielens_1m_with_titles_and_users_beside(tmp_path, given):
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.dat").write_text(ML_1M)
    (folder / "movies.dat").write_bytes(
        (
            '661::James, "J" (1996)::Animation|Children\'s|Musical\n1193::L\xe9on (1994)::Drama\n'
            "9::Nobody's (2000)::War\n"
        ).encode("latin-1")
    )
    (folder / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    path = {"folder": folder, "file": folder / "ratings.dat", "folder above": tmp_path}[given]
    data = take(path).data
    assert rows(data) == [["1", "2", "1"], ["1193", "661", "661"], [5, 3, 3], [978300760, 978302109, 978301968]]
    assert data.item_ids.tolist() == ["9", "661", "1193"]  # the catalogue says that 9 exists
    assert data.item_titles.tolist() == ["Nobody's (2000)", 'James, "J" (1996)', "Léon (1994)"]
    assert data.item_genres == (("War",), ("Animation", "Children's", "Musical"), ("Drama",))
    assert {name: column.tolist() for name, column in data.user_columns.items()} == {
        "gender": ["F", "M"],
        "age": ["1", "56"],
        "occupation": ["10", "16"],
        "zip_code": ["48067", "70072"],
    }


def test_movielens_csv_with_quoted_titles(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,11,4.5,5\n1,2,3.0,6\n")
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n11,"American President, The (1995)",Comedy|Drama\n2,Jumanji (1995),(no genres listed)\n'
    )
    data = take(tmp_path).data
    assert data.item_titles.tolist() == ["Jumanji (1995)", "American President, The (1995)"]
    assert data.item_genres == ((), ("Comedy", "Drama"))
    assert rows(data)[1:3] == [["11", "2"], [4.5, 3]]


BX = (
    '"User-ID";"ISBN";"Book-Rating"\r\n"276725";"034545104X";"0"\r\n"276726";"0155061224";"5"\r\n'
    '"276725";"0155061224";"0"\r\n'
)


@pytest.mark.parametrize(("zeros", "kept"), [("keep", 3), ("drop", 1)])
def test_book_crossing(tmp_path, zeros, kept):
    (tmp_path / "BX-Book-Ratings.csv").write_text(BX, newline="")
    (tmp_path / "BX-Books.csv").write_bytes(
        (
            '"ISBN";"Book-Title";"Book-Author"\r\n"034545104X";"Flesh \\"Tones\\"; a novel";"M"\r\n'
            '"0155061224";"Fran\xe7ais";"J"\r\n'
        ).encode("latin-1")
    )
    (tmp_path / "BX-Users.csv").write_text(
        '"User-ID";"Location";"Age"\n"276725";"tyler, texas, usa";NULL\n"276726";"seattle, usa";"18"\n'
    )
    result = take(tmp_path, implicit_zeros=zeros)
    data = result.data
    assert result.report.taken.format == "bookcrossing"
    assert len(data) == kept
    assert data.item_ids.tolist() == ["0155061224", "034545104X"]
    assert data.item_titles.tolist() == ["Français", 'Flesh "Tones"; a novel']
    if zeros == "keep":
        assert data.ratings.tolist() == [0, 5, 0]
        assert data.user_columns["location"].tolist() == ["tyler, texas, usa", "seattle, usa"]
        assert data.user_columns["age"].tolist() == ["", "18"]
    else:
        assert result.report.taken.dropped == {"rating 0: implicit": 2}
        assert data.user_ids.tolist() == ["276726"]


def test_lastfm_of_hetrec(tmp_path):
    (tmp_path / "user_artists.dat").write_text("userID\tartistID\tweight\n2\t51\t13883\n2\t52\t11690\n3\t52\t1\n")
    (tmp_path / "artists.dat").write_text(
        'id\tname\turl\tpictureURL\n51\tDuran "Duran\thttp://x\thttp://y\n52\tMorcheeba\thttp://z\t\n'
    )
    data = take(tmp_path).data
    assert rows(data) == [["2", "2", "3"], ["51", "52", "52"], [13883, 11690, 1], None]
    assert data.item_titles.tolist() == ['Duran "Duran', "Morcheeba"]


def test_lastfm_360k(tmp_path):
    (tmp_path / "usersha1-artmbid-artname-plays.tsv").write_text(
        '00000c289a\t3bd73256\tbetty blowtorch\t2137\n00000c289a\t\tdie "Ärzte\t1099\n'
        "00001411dc\t3bd73256\tbetty blowtorch\t5\n"
    )
    (tmp_path / "usersha1-profile.tsv").write_text(
        "00000c289a\tf\t22\tGermany\tFeb 1, 2007\n00001411dc\tm\t\tCanada\tx\n"
    )
    data = take(tmp_path).data
    assert data.item_ids.tolist() == ["betty blowtorch", 'die "Ärzte']
    assert data.ratings.tolist() == [2137, 1099, 5]
    assert data.user_columns["country"].tolist() == ["Germany", "Canada"]


AMAZON = [
    {
        "reviewerID": "A2SUAM1J3GNN3B",
        "asin": "0000013714",
        "overall": 5.0,
        "unixReviewTime": 1252800000,
        "helpful": [0, 1],
    },
    {
        "reviewerID": "A14VAT5EAX3D9S",
        "asin": "B00004Y2UT",
        "overall": 4,
        "unixReviewTime": 1363392000,
        "reviewText": "é",
    },
]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_amazon_json_lines(tmp_path, compress):
    text = "\n".join(json.dumps(line) for line in AMAZON)
    (tmp_path / "reviews.json").write_bytes(compress(text.encode()))
    result = take(tmp_path / "reviews.json")
    assert rows(result.data) == [
        ["A2SUAM1J3GNN3B", "A14VAT5EAX3D9S"],
        ["0000013714", "B00004Y2UT"],
        [5, 4],
        [1252800000, 1363392000],
    ]
    assert result.report.taken.columns["time"] == "unixReviewTime"


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('{"reviewerID": "A1"', "line 2: not an object in JSON"),
        ("[1, 2]", "line 2: not an object in JSON"),
        ("[" * 5000, "line 2: not an object in JSON"),
        (
            '{"reviewerID": null, "asin": "B", "overall": 1, "unixReviewTime": 1}',
            "line 2, column 'reviewerID': the id is",
        ),
        ('{"reviewerID": "A", "asin": "B", "overall": NaN, "unixReviewTime": 1}', "line 2, column 'overall'"),
        ('{"reviewerID": "A", "asin": "B", "unixReviewTime": 1}', "line 2, column 'overall': the rating is empty"),
        ('{"reviewerID": "\\ud800", "asin": "B", "overall": 2, "unixReviewTime": 1}', None),
    ],
)
def test_damaged_json_lines(tmp_path, line, where):
    good = [json.dumps(each) for each in AMAZON]
    (tmp_path / "r.json").write_text("\n".join([good[0], line, good[1]]))
    if where is not None:
        with pytest.raises(DataError, match=f"r.json, {where}"):
            take(tmp_path / "r.json")
    result = take(tmp_path / "r.json", on_bad_line="skip")
    assert len(result.data) == (2 if where else 3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_amazon_ratings_without_a_header_in_both_orders(tmp_path, order):
    lines = []
    for number in range(9):
        ids = (f"A2SUAM1J3GNN{number}B", f"B00004Y2U{number}")
        lines.append(f"{ids[order[0]]},{ids[order[1]]},{number % 5 + 1}.0,{1252800000 + number}")
    (tmp_path / "ratings_Books.csv").write_text("\n".join(lines))
    data = take(tmp_path / "ratings_Books.csv").data
    assert data.user_ids[0] == "A2SUAM1J3GNN0B"
    assert data.item_ids[0] == "B00004Y2U0"
    assert data.ratings[:5].tolist() == [1, 2, 3, 4, 5]


def test_amazon_2023_keeps_milliseconds(tmp_path):
    (tmp_path / "All_Beauty.csv").write_text(
        "user_id,parent_asin,rating,timestamp\nAGKH,B00YQ6X8EO,5.0,1588687728923\n"
    )
    assert rows(take(tmp_path / "All_Beauty.csv").data) == [["AGKH"], ["B00YQ6X8EO"], [5], [1588687728923]]


def test_sequences_of_two_files_are_a_published_split(tmp_path):
    (tmp_path / "train.txt").write_text("0 10 7 10\n1 7\n2 \n")
    (tmp_path / "test.txt").write_text("0 3 7\n1 10\n")
    result = take(tmp_path)
    data = result.data
    # Of user 0's repeated items 10 and 7 the later ones stay, with their places in the user's history.
    assert rows(data) == [["0", "1", "0", "0", "1"], ["10", "7", "3", "7", "10"], None, [2, 0, 3, 4, 1]]
    assert data.labels.tolist() == [0, 0, 2, 2, 2]
    assert result.report.taken.dropped == {"repeated (user, item) pairs": 2}
    assert result.report.taken.tallies[0].without == 1
    assert "published" in "\n".join(importing.next_steps(data))


@pytest.mark.parametrize("separator", [" ", "\t", ",", "  "])
def test_sequences_of_one_file(tmp_path, separator):
    lines = [separator.join(cells) for cells in (["a", "x", "y", "z"], ["b", "y"], ["a", "w"])]
    (tmp_path / "s.txt").write_text("\n".join(lines) + "\n")
    data = take(tmp_path / "s.txt", format="sequence").data
    assert rows(data) == [["a", "a", "a", "b", "a"], ["x", "y", "z", "y", "w"], None, [0, 1, 2, 0, 3]]


def test_whole_numbers_in_lines_of_unequal_length_are_sequences(tmp_path):
    lines = [[n, *range(n % 9 + 1)] for n in range(40)]
    (tmp_path / "s.txt").write_text("\n".join(" ".join(map(str, cells)) for cells in lines))
    result = take(tmp_path / "s.txt")
    assert result.report.taken.format == "sequence"
    assert len(result.data) == sum(n % 9 + 1 for n in range(40))


def test_a_damaged_line_of_sequences_is_left_out_as_a_whole(tmp_path):
    (tmp_path / "s.txt").write_text("a,x,y\nb,x,,y\nc,y\nd,z,z\n")
    with pytest.raises(DataError, match=r"s\.txt, line 2, column 'item': the id is empty"):
        take(tmp_path / "s.txt", format="sequence")
    result = take(tmp_path / "s.txt", format="sequence", on_bad_line="skip")
    assert rows(result.data)[:2] == [["a", "a", "c", "d"], ["x", "y", "y", "z"]]
    tally = result.report.taken.tallies[0]
    assert (tally.read, tally.rows, tally.n_bad) == (4, 3, 1)


def test_npz_brings_its_split_and_clients(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        user=[5, 5, 9],
        item=[0, 2, 2],
        split=[0, 2, 0],
        client=[1, 1, 0],
        num_items=4,
        rating=[1, 0, 3],
    )
    data = take(tmp_path / "x.npz").data
    assert rows(data)[:2] == [["5", "5", "9"], ["0", "2", "2"]]
    assert (data.labels.tolist(), data.owner.tolist(), data.n_items) == ([0, 2, 0], [1, 0], 2)
    assert take(tmp_path / "x.npz", keep_catalogue=True).data.n_items == 4
    zeros = take(tmp_path / "x.npz", implicit_zeros="drop")
    assert (len(zeros.data), zeros.report.taken.dropped) == (2, {"rating 0: implicit": 1})


def test_recbole_file_under_any_option_but_only_utf_8(tmp_path):
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\n1\t5\n2\t5\n")
    (tmp_path / "a.item").write_text("item_id:token\ttitle:token_seq\tgenre:token_seq\n5\tFive\tWar Drama\n")
    (tmp_path / "a.user").write_text("user_id:token\tage:token\tmarket:token\n1\t7\tde\n2\t8\tus\n")
    for data in (take(tmp_path / "a.inter").data, take(tmp_path).data):
        assert data.item_genres == (("War", "Drama"),)
        assert data.user_markets.tolist() == ["de", "us"]
        assert data.user_columns["age"].tolist() == ["7", "8"]


# --- options

TWICE = "user,item,rating,time\na,x,2,20\nb,x,1,5\na,x,5,10\na,x,4,20\n"


@pytest.mark.parametrize(("dedupe", "rating"), [("last", 4), ("first", 5), ("max", 5)])
def test_repeated_pairs(tmp_path, dedupe, rating):
    (tmp_path / "r.csv").write_text(TWICE)
    result = take(tmp_path / "r.csv", dedupe=dedupe)
    assert sorted(zip(*rows(result.data)[:3], strict=True)) == [("a", "x", rating), ("b", "x", 1)]
    assert result.report.taken.dropped == {"repeated (user, item) pairs": 2}
    assert "2 left out: repeated" in "\n".join(result.report.lines())


def test_the_highest_rating_needs_ratings(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\n1,2\n1,2\n")
    with pytest.raises(DataError, match="there are no ratings"):
        take(tmp_path / "r.csv", dedupe="max")


_pairs = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=25
)


@settings(max_examples=40)
@given(_pairs, st.sampled_from(["last", "first", "max"]), st.booleans())
def test_repeated_pairs_by_brute_force(tmp_path_factory, table, which, timed):
    path = tmp_path_factory.mktemp("pairs") / "r.csv"
    lines = [",".join(map(str, row if timed else row[:3])) for row in table]
    path.write_text(("user,item,rating,time" if timed else "user,item,rating") + "\n" + "\n".join(lines))
    best = {}
    for number, (user, item, rating, time) in enumerate(table):
        time = time if timed else 0
        rank = {"last": (time, number), "first": (-time, -number), "max": (rating, time, number)}[which]
        best[user, item] = max(best.get((user, item), (rank, number)), (rank, number))
    kept = sorted(number for _, number in best.values())
    data = take(path, dedupe=which).data
    assert rows(data)[:3] == [
        [str(table[n][0]) for n in kept],
        [str(table[n][1]) for n in kept],
        [table[n][2] for n in kept],
    ]


def test_min_rating_looks_at_the_rating_that_stays(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,rating,time\n1,1,5,1\n1,1,2,2\n1,2,4,1\n2,3,1,1\n")
    result = take(tmp_path / "r.csv", min_rating=4)
    assert rows(result.data)[:2] == [["1"], ["2"]]
    assert (result.data.n_users, result.data.n_items) == (1, 1)
    assert result.report.taken.dropped == {"repeated (user, item) pairs": 1, "rated below 4": 2}
    with pytest.raises(DataError, match="nothing is left: all 3 interactions are rated below 9"):
        take(tmp_path / "r.csv", min_rating=9)
    (tmp_path / "r.csv").write_text("user,item\n1,1\n")
    with pytest.raises(DataError, match="--min-rating needs ratings"):
        take(tmp_path / "r.csv", min_rating=1)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=25, unique=True),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_the_core_is_what_one_by_one_removal_leaves(pairs, least_items, least_users):
    left = set(pairs)
    while True:
        bad = next(
            (
                pair
                for pair in left
                if sum(user == pair[0] for user, _ in left) < least_items
                or sum(item == pair[1] for _, item in left) < least_users
            ),
            None,
        )
        if bad is None:
            break
        left.remove(bad)
    users, items = np.array(pairs).T
    keep = k_core(users, items, least_items, least_users)
    assert {pair for pair, kept in zip(pairs, keep, strict=True) if kept} == left


def test_k_core_and_its_options(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\n1,1\n1,2\n2,1\n2,2\n3,1\n")
    result = take(tmp_path / "r.csv", k_core=(2, 2))
    assert (result.data.n_users, result.data.n_items, len(result.data)) == (2, 2, 4)
    assert result.report.taken.dropped == {"not in the 2,2-core": 1}
    with pytest.raises(DataError, match="nothing is left: all 5 interactions are not in the 3,3-core"):
        take(tmp_path / "r.csv", k_core=(3, 3))
    assert importing.parse_k_core("5, 10") == (5, 10)
    assert importing.parse_k_core("5") == (5, 5)
    for text in ("", "a", "1,2,3", "-1", "²"):
        with pytest.raises(DataError, match="--k-core"):
            importing.parse_k_core(text)


def test_a_part_of_a_data_set_is_numbered_anew():
    data = from_raw(
        "x",
        ["10", "9", "z", "9"],
        ["b", "10", "9", "b"],
        [1, 2, 3, 4],
        owners=["p", "q", "r", "q"],
        item_titles={"9": "nine"},
        item_genres={"10": ["War"]},
        user_columns={"age": {"9": "33"}},
    )
    part = subset(data, np.array([False, True, True, False]) & (data.ratings < 3) | (data.ratings == 1), ["9"])
    # Without the user z all ids are integers, which are sorted by value.
    assert part.user_ids.tolist() == ["9", "10"]
    assert part.item_ids.tolist() == ["10", "9", "b"]  # 9 has no row, but the catalogue names it
    assert rows(part)[:3] == [["10", "9"], ["b", "10"], [1, 2]]
    assert part.owner.tolist() == [1, 0]
    assert part.item_titles.tolist() == ["", "nine", ""]
    assert part.item_genres == (("War",), (), ())
    assert part.user_columns["age"].tolist() == ["33", ""]


@pytest.mark.parametrize(
    "text", ["x\ny\nunseen\n", "id,title,genres\nx,Ex,War\ny,Why,\nunseen,None,War|Drama\n", "item_id\nx\ny\nunseen\n"]
)
def test_a_catalogue_adds_items(tmp_path, text):
    (tmp_path / "r.csv").write_text("user,item\n1,x\n2,y\n")
    (tmp_path / "c.csv").write_text(text)
    data = take(tmp_path / "r.csv", items=tmp_path / "c.csv").data
    assert data.item_ids.tolist() == ["unseen", "x", "y"]
    if "title" in text:
        assert data.item_titles.tolist() == ["None", "Ex", "Why"]
        assert data.item_genres == (("War", "Drama"), ("War",), ())
    # Filters do not take from the catalogue.
    assert take(tmp_path / "r.csv", items=tmp_path / "c.csv", k_core=(1, 1)).data.n_items == 3


def test_amazon_metadata_are_a_catalogue(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\n1,B1\n")
    (tmp_path / "meta.json").write_text(
        '{"asin": "B1", "title": "Tea", "categories": [["Food", "Tea"]]}\n{"asin": "B2"}\n'
    )
    data = take(tmp_path / "r.csv", items=tmp_path / "meta.json").data
    assert (data.item_titles.tolist(), data.item_genres) == (["Tea", ""], (("Food", "Tea"), ()))


def test_markets_of_rows_and_of_users(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,shop\n1,5,us\n1,5,de\n3,20,us\n")
    assert take(tmp_path / "r.csv", market_col="shop").data.user_ids.tolist() == ["de/1", "us/1", "us/3"]
    assert take(tmp_path / "r.csv").data.user_markets is None
    (tmp_path / "u.csv").write_text("user,country,zip\n1,fr,05201\n3,it,\n4,es,1\n")
    data = take(tmp_path / "r.csv", users=tmp_path / "u.csv", market_col="country").data
    assert data.user_markets.tolist() == ["fr", "it"]
    assert data.user_columns["zip_code"].tolist() == ["05201", ""]
    plain = take(tmp_path / "r.csv", users=tmp_path / "u.csv").data
    assert plain.user_markets is None
    assert plain.user_columns["country"].tolist() == ["fr", "it"]
    (tmp_path / "r.csv").write_text("user,item,market\n1,5,us\n1,5,d/e\n3,20,\n1,6,us\n1,7,us\n")
    with pytest.raises(DataError, match="line 3, column 'market': the name holds a '/'"):
        take(tmp_path / "r.csv")
    assert take(tmp_path / "r.csv", on_bad_line="skip").report.taken.tallies[0].n_bad == 2


# --- data sets known by name


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHUR_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


def write(path, n_users=6):
    lines = [
        f"u{user},i{(user * 3 + place * place) % 11},{place % 5 + 1},{place}"
        for user in range(n_users)
        for place in range(6)
    ]
    path.write_text("user,item,rating,timestamp\n" + "\n".join(lines) + "\n")
    return path


def test_what_was_imported_is_known_by_name(tmp_path, home):
    save_imported(take(write(tmp_path / "r.csv")))
    assert imported() == ["mine"]
    assert "mine" in data_sets()
    settings_of_run = load_settings("mine", "local")
    assert settings_of_run.dataset.name == "mine"
    data = load_dataset("mine")
    assert data.fingerprint() == take(tmp_path / "r.csv").data.fingerprint()
    assert fetch("mine") == home / "mine"
    card = read_card(home / "mine")
    assert card["import"]["columns"] == {"user": "user", "item": "item", "rating": "rating", "time": "timestamp"}
    assert len(card["files"]["r.csv"]) == 64
    assert str(tmp_path) not in json.dumps(card)
    with pytest.raises(ConfigError, match=r"unknown dataset 'mime'; did you mean 'mine'\? Known: .*mine"):
        load_settings("mime")
    with pytest.raises(DataError, match="did you mean mine"):
        load_dataset("minee")


def test_a_data_set_is_replaced_only_by_force(tmp_path, home):
    save_imported(take(write(tmp_path / "r.csv")))
    other = take(write(tmp_path / "r.csv", n_users=3))
    with pytest.raises(DataError, match="--force"):
        save_imported(other)
    assert load_dataset("mine").n_users == 6
    save_imported(other, force=True)
    assert load_dataset("mine").n_users == 3
    assert [path.name for path in home.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["ml-100k", "synthetic", "own-data", "prepared"])
def test_names_of_fedhur_are_refused(home, name):
    with pytest.raises(DataError, match="taken by a data set of FedHUR"):
        check_name(name, force=True)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\\b", "a b", "-x", "x\n"])
def test_names_that_are_no_names_are_refused(home, name):
    with pytest.raises(DataError, match="begins with a letter or digit"):
        check_name(name)


def test_a_folder_that_is_no_data_set_is_left_alone(home):
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is no data set"):
        check_name("mine", force=True)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_the_command_says_what_it_took_and_how_to_go_on(tmp_path, home):
    path = write(tmp_path / "r.csv")
    path.write_text(path.read_text() + "u1,i1,nan,3\n")
    shown = invoke("data", "import", path, "--name", "mine")
    assert shown.exit_code == 2
    assert "line 38, column 'rating'" in shown.output
    assert not home.exists() or not any(home.iterdir())
    shown = invoke(
        "data", "import", path, "--name", "mine", "--on-bad-line", "skip", "--min-rating", 2, "--k-core", "1,2"
    )
    assert shown.exit_code == 0, shown.output
    for text in (
        "separator: comma",
        "user: user",
        "time: timestamp",
        "u0  i0  1",
        "1 damaged line left out",
        "rated below 2",
    ):
        assert text in shown.output
    assert "fedhur run --dataset mine" in shown.output
    described = invoke("data", "describe", "mine", "--set", "dataset.clients.number=2")
    assert described.exit_code == 0, described.output
    assert "mine" in described.output
    assert invoke("data", "import", path, "--name", "mine").exit_code == 2


@pytest.mark.parametrize("kind", ["csv", "inter"])
def test_many_rows_are_those_of_the_other_way_in(tmp_path, kind):
    rng = np.random.default_rng(1)
    pairs = rng.permutation(300 * 200)[:5000]
    table = np.stack(
        [pairs // 200 + 1, pairs % 200 + 1, rng.integers(1, 6, 5000), rng.integers(8e8, 9e8, 5000)], axis=1
    )
    head = {
        "csv": "user,item,rating,timestamp",
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float",
    }[kind]
    separator = "," if kind == "csv" else "\t"
    np.savetxt(tmp_path / f"x.{kind}", table, fmt="%d", delimiter=separator, header=head, comments="")
    data = take(tmp_path / f"x.{kind}").data
    assert movielens.content_sha256(data) == movielens.content_sha256(from_raw("x", *table.T))


def test_reading_keeps_no_python_object_a_row(tmp_path, monkeypatch):
    n = 200_000
    batches = sources.Text.batches
    monkeypatch.setattr(sources.Text, "batches", lambda text: batches(text, 1 << 17))
    monkeypatch.setattr(sources, "CHUNK", 1 << 17)
    with (tmp_path / "big.csv").open("w") as file:
        file.write("userId,movieId,rating,timestamp\n")
        file.writelines(f"{row % 997},{row // 997},{row % 9 / 2},{881250949 + row}\n" for row in range(n))
    tracemalloc.start()
    data = take(tmp_path / "big.csv").data
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) == n
    # Some arrays of 8 bytes a row; a list of rows would take 300 bytes a row and more.
    assert peak < 100 * n


def test_next_steps_name_a_number_of_clients_that_the_users_can_fill():
    few = from_raw("few", np.arange(40), np.zeros(40, dtype=int))
    many = from_raw("many", np.arange(100), np.zeros(100, dtype=int))
    assert all(line.endswith("few --set dataset.clients.number=4") for line in importing.next_steps(few))
    assert all(line.endswith("many") for line in importing.next_steps(many))


def test_names_of_thousands_of_columns_are_not_printed(tmp_path):
    (tmp_path / "r.csv").write_text("user,item," + ",".join(f"c{n}" for n in range(998)) + "\n1,2" + ",0" * 998 + "\n")
    printed = "\n".join(take(tmp_path / "r.csv").report.lines())
    assert "c37, ... (1000 columns)" in printed
    assert "c40" not in printed


def test_a_least_rating_is_finite(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,rating\n1,2,3\n")
    with pytest.raises(DataError, match="--min-rating nan: a finite number"):
        take(tmp_path / "r.csv", min_rating=float("nan"))
