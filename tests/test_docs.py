"""The worked example of docs/data.md: its files, its commands, and every line of output that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedhur_app.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
BLOCK = re.compile(r"^```(file (?P<file>\S+)|console)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(content):
    """Each command of a console block with the lines shown below it."""
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield shlex.split(command), shown.splitlines()


def test_the_worked_example_runs_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHUR_DATA", str(tmp_path / "data"))
    ran = []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["file"]:
            Path(block["file"]).write_text(block["content"], encoding="utf-8")
            continue
        for (program, *arguments), shown in commands(block["content"]):
            assert program == "fedhur"
            outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
            wrong = any(line.startswith("error:") for line in shown)
            assert outcome.exit_code == (2 if wrong else 0), outcome.output
            for line in shown:
                assert line in outcome.output
            ran.append(arguments[:2])
    assert ran == [["data", "import"], ["data", "import"], ["data", "describe"], ["run", "--dataset"]]


@pytest.mark.parametrize("kind", ["split", "clients"])
def test_the_page_names_every_split_and_partition(kind):
    from fedhur_app.data.partition import PARTITIONS
    from fedhur_app.data.split import SPLITS

    text = PAGE.read_text(encoding="utf-8").partition(f"| `dataset.{kind}.kind` |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", text, flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(.*?)`", cell)}
    assert named == set(SPLITS if kind == "split" else PARTITIONS)


def test_every_field_case_has_tests_that_exist():
    root = PAGE.parents[1] / "tests"
    rows = re.findall(
        r"^\| (\d+) \|(.*)\|$", PAGE.with_name("field-cases.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    for _, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named
        for file, test in named:
            assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), f"{file}::{test}"
