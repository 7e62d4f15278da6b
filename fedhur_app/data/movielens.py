"""MovieLens: 100K from its publisher or from the copy inside the RecBole package, and the larger ones."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedhur_app.data.archives import Archive, Counts
from fedhur_app.data.download import Say
from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import read_grouplens_100k, read_recbole
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import OTHER_MARKET
from fedhur_app.data.reading.details import ML_100K_GENRES

_FOLDER = "https://files.grouplens.org/datasets/movielens"
# The publisher's server also answers without encryption, which helps where its certificate is not accepted; what it
# sends is verified all the same.
_PLAIN_FOLDER = "http://files.grouplens.org/datasets/movielens"
_PUBLICATION = """\
F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context.
ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19. https://doi.org/10.1145/2827872"""
LICENCE = f"""\
MovieLens is (c) GroupLens Research, University of Minnesota. Terms of this data set: research use; no commercial
use and no redistribution without permission; do not imply an endorsement; publications cite
{_PUBLICATION}"""
LICENCE_SHARED = f"""\
MovieLens is (c) GroupLens Research, University of Minnesota. Terms of this data set: research use; no commercial
use without permission; redistribution under the same terms only; do not imply an endorsement; publications cite
{_PUBLICATION}"""

# MD5 as GroupLens publishes them beside the archives; SHA-256 and sizes as in TensorFlow Datasets
# (url_checksums/movielens.txt), whose SHA-256 of ml-100k, ml-1m and ml-25m belong to the same files.
ML_100K = Archive((f"{_FOLDER}/ml-100k.zip",), "md5:0e33842e24a9c977be4e0107933c0723", 4924029)
ML_1M = Archive((f"{_FOLDER}/ml-1m.zip", f"{_PLAIN_FOLDER}/ml-1m.zip"), "md5:c4d9eecfca2ab87c1945afe126590906", 5917549)
ML_25M = Archive(
    (f"{_FOLDER}/ml-25m.zip", f"{_PLAIN_FOLDER}/ml-25m.zip"), "md5:6b51fb2759a8657d3bfcbfc42b592ada", 261978986
)
# Encrypted only: its checksum comes from the same place.
ML_LATEST_SMALL = Archive(
    (f"{_FOLDER}/ml-latest-small.zip",),
    "sha256:696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
    978202,
    changes=True,
)
# Users and ratings as their README files say; films are those with a rating, and no others are
# kept (the catalogues have 3883, 62423 and 9742).
ML_1M_COUNTS = Counts(6040, 3706, 1000209)
ML_25M_COUNTS = Counts(162541, 59047, 25000095)
ML_LATEST_SMALL_COUNTS = Counts(610, 9724, 100836)

PACKAGE = "recbole==1.2.1"
PACKAGE_FOLDER = "recbole/dataset_example/ml-100k"
PACKAGE_SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
# Of the rows in file order, as content_sha256 computes it; the same from either source.
CONTENT_SHA256 = "d0366dc73dcd6c6620782fc3436fc07a4a003fe17c863aee0829c53db6a8f574"


def read_ml_100k(archive: Path, workspace: Path) -> Interactions:
    """Read MovieLens 100K as published.

    Args:
        archive: The verified archive.
        workspace: An empty folder, for the files in it.

    Raises:
        DataError: The rows are not the published ones.
    """
    with zipfile.ZipFile(archive) as members:
        for member in ("u.data", "u.item", "u.user"):
            (workspace / member).write_bytes(members.read(f"ml-100k/{member}"))
    return _checked(read_grouplens_100k(workspace))


def ml_100k_from_package(workspace: Path, say: Say) -> Interactions:
    """Read the copy of MovieLens 100K inside the RecBole package, which pip downloads.

    It gives the same rows in the same order, and titles and genres as the publisher writes them: `Name, The (1995)`.

    Args:
        workspace: An empty folder, for the package and the files in it.
        say: Takes each line that people should read.

    Raises:
        DataError: pip cannot get the package, or a checksum is wrong.
    """
    say(f"taking the copy inside the package {PACKAGE} instead")
    return _checked(_from_package(_download_package(workspace), workspace))


def with_zip_code_markets(data: Interactions, name: str) -> Interactions:
    """The same data under another name, with regions as markets: the first digit of a user's zip code.

    The ten digits are the ten zip code areas of the USA, from "0" (the north-east) to "9" (the Pacific). Zip codes
    that begin otherwise (Canadian ones begin with a letter), and users without one, are the market "other".

    Args:
        data: A data set with zip codes.
        name: Name of the result.

    Raises:
        DataError: The data set has no zip codes.
    """
    if "zip_code" not in data.user_columns:
        raise DataError(f"{data.name} has no zip codes to make markets of; fetch it again")
    first = [code[:1] for code in data.user_columns["zip_code"].tolist()]
    markets = np.array([digit if digit in set("0123456789") else OTHER_MARKET for digit in first])
    return replace(data, name=name, user_markets=markets)


def content_sha256(data: Interactions) -> str:
    """SHA-256 of the rows (user id, item id, rating, time) as int64 little-endian, (n, 4)."""
    assert data.ratings is not None
    assert data.timestamps is not None
    columns = (data.user_ids[data.users], data.item_ids[data.items], data.ratings, data.timestamps)
    rows = np.stack([column.astype("<i8") for column in columns], axis=1)
    return hashlib.sha256(rows.tobytes()).hexdigest()


def _checked(data: Interactions) -> Interactions:
    if content_sha256(data) != CONTENT_SHA256:
        raise DataError("the rows of MovieLens 100K are not the published ones; no data set was made")
    return data


def _download_package(workspace: Path) -> Path:
    """Have pip fetch the package file (not install it): the registry is the one that the user configured."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "-d", str(workspace)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        failure = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except subprocess.TimeoutExpired:
        failure = ["no answer within 300 seconds"]
    wheels = sorted(workspace.glob("*.whl"))
    if failure is not None or not wheels:
        raise DataError(
            f"`{' '.join(command[:5])}` failed ({' '.join(failure or ['it left no file'])}). "
            "Check the network, and that pip is there (python -m ensurepip)."
        )
    return wheels[0]


def _from_package(wheel: Path, workspace: Path) -> Interactions:
    with zipfile.ZipFile(wheel) as members:
        for name, expected in PACKAGE_SHA256.items():
            content = members.read(f"{PACKAGE_FOLDER}/{name}")
            if hashlib.sha256(content).hexdigest() != expected:
                raise DataError(f"{name} in the package {PACKAGE} has a wrong checksum; nothing was kept")
            (workspace / name).write_bytes(content)
    return _as_published(read_recbole(workspace, "ml-100k"))


def _as_published(data: Interactions) -> Interactions:
    """Write titles and genres the publisher's way: one title is misspelt in the package."""
    assert data.item_titles is not None
    assert data.item_genres is not None
    return replace(
        data,
        item_titles=np.where(data.item_titles == "unkonwn (unkonwn)", "unknown", data.item_titles),
        item_genres=tuple(tuple(sorted(genres, key=ML_100K_GENRES.index)) for genres in data.item_genres),
    )
