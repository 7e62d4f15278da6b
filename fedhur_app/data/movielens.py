"""MovieLens 100K: from its publisher, else from the copy inside the RecBole package."""

import hashlib
import http.client
import io
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import ML_100K_GENRES, read_grouplens_100k, read_recbole
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import OTHER_MARKET

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
# Published beside the archive.
ZIP_MD5 = "0e33842e24a9c977be4e0107933c0723"
PACKAGE = "recbole==1.2.1"
PACKAGE_FOLDER = "recbole/dataset_example/ml-100k"
PACKAGE_SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
# Of the rows in file order, as content_sha256 computes it; the same from either source.
CONTENT_SHA256 = "d0366dc73dcd6c6620782fc3436fc07a4a003fe17c863aee0829c53db6a8f574"
CONNECT_SECONDS = 5.0

LICENCE = """\
MovieLens 100K is (c) GroupLens Research, University of Minnesota. Its terms: research use; no commercial
use and no redistribution without permission; do not imply an endorsement; publications cite
F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context.
ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19. https://doi.org/10.1145/2827872"""


def build_ml_100k(workspace: Path, say: Callable[[str], object]) -> Interactions:
    """Get MovieLens 100K from the first source that can be reached and check it.

    Both sources give the same rows in the same order, and titles and genres as the publisher writes them:
    `Name, The (1995)`.

    Args:
        workspace: An empty folder for the downloads; the caller deletes it.
        say: Takes each line that people should read.

    Raises:
        DataError: No source can be reached, or a checksum is wrong.
    """
    try:
        archive = _download(URL)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        say(f"{URL} is not reachable ({reason}); taking the copy inside the package {PACKAGE} instead.")
        data = _from_package(_download_package(workspace), workspace)
    else:
        data = _from_publisher(archive, workspace)
    if content_sha256(data) != CONTENT_SHA256:
        raise DataError("the rows of MovieLens 100K are not the published ones; nothing was kept")
    return data


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


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
        return answer.read()


def _from_publisher(archive: bytes, workspace: Path) -> Interactions:
    if hashlib.md5(archive, usedforsecurity=False).hexdigest() != ZIP_MD5:
        raise DataError(f"what {URL} sent has a wrong checksum; nothing was kept, try again later")
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        for member in ("u.data", "u.item", "u.user"):
            (workspace / member).write_bytes(members.read(f"ml-100k/{member}"))
    return read_grouplens_100k(workspace)


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
            f"MovieLens 100K could not be fetched: {URL} is not reachable, and "
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
