"""What the folder of a study, or a report that a command left, tells a report page."""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhur_app.reporting.page_runs import Problem, read, shown

# Files that make a folder a document, the most telling first: kind, all files it must have, the one with its text.
DOCUMENTS = (
    ("study", ("study.json",), "report.md"),
    ("markets", ("markets.csv", "report.md"), "report.md"),
    ("tuning", ("trials.csv", "summary.md"), "summary.md"),
    ("comparison", ("summary.csv", "table.md"), "table.md"),
)
MOST_ROWS = 1000  # of a CSV file
MOST_PICTURE_BYTES = 4 * 2**20
_FACTS = (("command", "command"), ("machine", "machine"), ("made", "date"))


@dataclass(frozen=True)
class Picture:
    """A PNG or SVG file.

    Attributes:
        file: Its name.
        title: One line.
        says: What it shows; may be empty.
        content: The file.
    """

    file: str
    title: str
    says: str
    content: bytes


@dataclass(frozen=True)
class Sheet:
    """A CSV file.

    Attributes:
        file: Its name.
        title: One line.
        head: Names of the columns.
        rows: Cells as they are in the file, at most :data:`MOST_ROWS` rows.
        left_out: Number of further rows.
    """

    file: str
    title: str
    head: list[str]
    rows: list[list[str]]
    left_out: int


@dataclass(frozen=True)
class Document:
    """A study, or the report that a command left in its folder.

    Attributes:
        kind: `study`, `markets`, `tuning` or `comparison`.
        folder: Its folder.
        name: The folder's path as shown.
        title: One line.
        question: What a study asks; else empty.
        facts: (name, value) to show below the title.
        text: Markdown.
        pictures: Pictures in the folder.
        sheets: CSV files in the folder.
        arms: (name, data, strategy, settings) of a study's arms.
    """

    kind: str
    folder: Path
    name: str
    title: str
    question: str
    facts: list[tuple[str, str]]
    text: str
    pictures: list[Picture]
    sheets: list[Sheet]
    arms: list[tuple[str, str, str, str]]


def read_document(kind: str, folder: Path, root: Path, files: set[str], problems: list[Problem]) -> Document:
    """A document of a known kind.

    Args:
        kind: One of :data:`DOCUMENTS`.
        folder: Its folder.
        root: The folder that was asked for, at or above it.
        files: Names of the files in it.
        problems: Gets what cannot be read.
    """
    study: Any = read(folder / "study.json", json.loads, problems) if kind == "study" else {}
    if not isinstance(study, dict):
        problems.append(Problem(str(folder / "study.json"), "is damaged: it must hold an object"))
        study = {}
    text_file = next(text for name, _, text in DOCUMENTS if name == kind)
    text = read(folder / text_file, str, problems) or ""
    first, _, rest = text.partition("\n")
    title = str(study.get("title") or study.get("study") or folder.resolve().name)
    if first.startswith("# "):
        # The heading of the text is the title of the section.
        title, text = (title if kind == "study" and study.get("title") else first[2:].strip()), rest
    question = str(study.get("question", ""))
    if question and text.lstrip().startswith(question):
        text = text.lstrip().removeprefix(question)  # The section begins with it.
    facts = [(name, str(study[key])) for key, name in _FACTS if study.get(key)]
    if isinstance(study.get("seeds"), list):
        facts.append(("seeds", ", ".join(map(str, study["seeds"]))))
    if study.get("quick") is True:
        facts.append(("size", "quick: a small version, whose numbers mean nothing"))
    arms = study["arms"] if isinstance(study.get("arms"), list) else []
    return Document(
        kind,
        folder,
        shown(folder, root),
        title,
        question,
        facts,
        text,
        _pictures(folder, _named(study.get("figures")), files, problems),
        _sheets(folder, _named(study.get("tables")), files, problems),
        [
            (
                str(arm.get("name", "")),
                str(arm.get("data", "")),
                str(arm.get("strategy", "")),
                " ".join(map(str, arm["set"])) if isinstance(arm.get("set"), list) else "",
            )
            for arm in arms
            if isinstance(arm, dict)
        ],
    )


def _named(entries: Any) -> dict[str, tuple[str, str]]:
    """File -> (title, what it says), as study.json has them."""
    entries = entries if isinstance(entries, list) else []
    return {
        str(entry["file"]): (str(entry.get("title", "")), str(entry.get("says", "")))
        for entry in entries
        if isinstance(entry, dict) and "file" in entry
    }


def _beside(folder: Path, named: Iterable[str], files: set[str], ends: tuple[str, ...]) -> Iterable[tuple[str, Path]]:
    """Files of a kind in a folder, those that are named first. A name that leads elsewhere is none of them."""
    for name in [*named, *sorted(files, key=natural)]:
        if name.lower().endswith(ends):
            yield name, folder / name


def _pictures(
    folder: Path, named: dict[str, tuple[str, str]], files: set[str], problems: list[Problem]
) -> list[Picture]:
    found: dict[str, Picture] = {}
    for name, path in _beside(folder, named, files, (".png", ".svg")):
        if name in found or not _is_inside(path, folder, problems):
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            problems.append(Problem(str(path), f"cannot be read ({error.strerror})"))
            continue
        right = content.startswith(b"\x89PNG\r\n\x1a\n") if name.lower().endswith(".png") else b"<svg" in content
        if not right or len(content) > MOST_PICTURE_BYTES:
            limit = f"is larger than {MOST_PICTURE_BYTES // 2**20} MiB; the picture is left out"
            problems.append(Problem(str(path), limit if right else "is not the picture that its name says"))
            continue
        title, says = named.get(name, ("", ""))
        found[name] = Picture(name, title or Path(name).stem.replace("_", " ").replace("-", " "), says, content)
    return list(found.values())


def _sheets(folder: Path, named: dict[str, tuple[str, str]], files: set[str], problems: list[Problem]) -> list[Sheet]:
    found: dict[str, Sheet] = {}
    for name, path in _beside(folder, named, files, (".csv",)):
        if name in found or not _is_inside(path, folder, problems):
            continue
        lines = read(path, lambda text: list(csv.reader(text.splitlines())), problems)
        if lines is None:
            if not path.exists():
                problems.append(Problem(str(path), "there is no such file"))
            continue
        if not lines:
            continue
        head, *rows = lines
        wide = [(row + [""] * len(head))[: len(head)] for row in rows[:MOST_ROWS]]
        found[name] = Sheet(name, named.get(name, ("", ""))[0] or name, head, wide, max(0, len(rows) - MOST_ROWS))
    return list(found.values())


def _is_inside(path: Path, folder: Path, problems: list[Problem]) -> bool:
    """Whether the file really lies in the folder: study.json must not bring other files of the machine into a page."""
    if path.resolve().parent == folder.resolve():
        return True
    problems.append(Problem(str(path), "does not lie in the folder itself and is left out"))
    return False


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorting key with which seed-2 comes before seed-10."""
    parts = "".join(c if c.isdigit() and c.isascii() else f"\0{c}\0" for c in name).split("\0")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
