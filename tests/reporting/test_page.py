import base64
import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedhur_app.cli import app
from fedhur_app.files import write_text
from fedhur_app.reporting.page import Page, collect
from fedhur_app.reporting.page_html import to_page
from fedhur_app.reporting.page_results import MOST_POINTS, SHOWN_LINES, script_json, thinned
from tests.reporting.folders import PNG, federated_run, study

VOID = {"meta", "link", "img", "input", "hr", "wbr", "br"}
SVG_LEAVES = {"line", "circle", "polygon", "polyline"}


class Parsed(HTMLParser):
    """A page as elements, with a check that every element that was opened is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.words.append(data)
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data

    def rows(self, first: str) -> list[list[str]]:
        return [row for row in self.cells if row and row[0] == first]

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Test NDCG of fedhur 0.30 and 0.40, fedavg 0.25 and 0.15, of two seeds; fedcia failed."""
    root = tmp_path / "cmp"
    for name, values in (("fedavg", (0.25, 0.15)), ("fedhur", (0.3, 0.4))):
        for seed, test in enumerate(values, 1):
            federated_run(root / "runs" / name / f"seed-{seed}", name, seed, [0.1, 0.2 + seed / 100, 0.2], test)
    federated_run(root / "runs/fedcia/seed-1", "fedcia", 1, [0.1], 0, status="failed", reason="<b>no</b> memory\nx")
    return root


def test_means_and_deviations_are_those_of_the_run_folders(comparison: Path) -> None:
    page = collect([comparison])
    (results,) = page.results
    assert [(arm.name, arm.values("test_ndcg@10")) for arm in results.arms] == [
        ("fedhur", [0.3, 0.4]),
        ("fedavg", [0.25, 0.15]),
        ("fedcia", []),
    ]
    parsed = Parsed(to_page(page))
    deviation = f"{0.1 / math.sqrt(2):.4f}"
    test, validation, cost, *_ = parsed.rows("fedhur")
    assert test == ["fedhur", "2", f"0.1750 ± {0.05 / math.sqrt(2):.4f}", f"0.3500 ± {deviation}"]
    assert validation == ["fedhur", "2", "0.1075 ± 0.0035", "0.2150 ± 0.0071"]
    assert cost[:4] == ["fedhur", "2", "1.00 ± 0.00", "1.00 ± 0.00"]
    best = next(row for row in parsed.rows("ml-100k") if "fedhur" in row)
    assert best[2:7] == ["5", "fedhur", f"0.3500 ± {deviation}", "0.3000", "0.4000"]
    assert best[-2:] == ["fedavg", f"0.2000 ± {deviation}"]


def test_the_better_mean_is_marked_and_cheap_is_better(tmp_path: Path) -> None:
    federated_run(tmp_path / "a", "fedavg", 1, [0.1], 0.2, seconds=3.0)
    federated_run(tmp_path / "b", "fedhur", 1, [0.1], 0.3, seconds=5.0)
    text = to_page(collect([tmp_path]))
    assert re.search(r'class="n best" data-v="0.3">0.3000<', text)
    assert re.search(r'class="n best" data-v="3.0">3.0<', text)
    assert not re.search(r'class="n best" data-v="0.2"', text)


def test_all_runs_stand_in_one_table_with_why_they_failed(comparison: Path) -> None:
    parsed = Parsed(to_page(collect([comparison])))
    runs = [row for row in parsed.cells if row and row[0].startswith("cmp/runs/")]
    assert len(runs) == 5
    failed = next(row for row in runs if row[2] == "fedcia")
    assert failed[4] == "failed"
    assert failed[-1] == "<b>no</b> memory"


def test_settings_that_differ_are_told_from_those_that_all_share(tmp_path: Path) -> None:
    for number, changes in enumerate(("train.lr=0.01", "train.lr=0.01", "train.lr=0.05 server.threads=3"), 1):
        federated_run(tmp_path / f"run-{number}", "fedavg", number, [0.1], 0.2, changes)
    page = collect([tmp_path])
    assert sorted(page.different_settings()) == ["server.threads", "train.lr"]
    assert page.shared_settings()["train.epochs"] == page.runs[0].settings["train.epochs"]
    assert not {"train.lr", "seed", "server.threads"} & set(page.shared_settings())
    parsed = Parsed(to_page(page))
    table = next(row for row in parsed.cells if row[:2] == ["arm", "seeds"] and "train.lr" in row)
    values = next(row for row in parsed.rows("fedavg (train.lr=0.05)") if len(row) == len(table) and row[1] == "3")
    assert dict(zip(table, values, strict=True)) == {
        "arm": "fedavg (train.lr=0.05)", "seeds": "3", "train.lr": "0.05", "server.threads": "3"
    }  # fmt: skip
    assert ["train.batch_size", str(page.runs[0].settings["train.batch_size"])] in parsed.cells


def test_runs_that_differ_in_their_seed_or_their_machine_are_one_arm(tmp_path: Path) -> None:
    federated_run(tmp_path / "one", "fedavg", 1, [0.1], 0.2)
    federated_run(tmp_path / "two", "fedavg", 2, [0.1], 0.3, "device=cpu server.threads=2")
    (arm,) = collect([tmp_path]).results[0].arms
    assert (arm.name, arm.values("test_ndcg@10")) == ("fedavg", [0.2, 0.3])


def test_seeds_of_two_comparisons_stand_together_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    federated_run(tmp_path / "a/runs/fedavg/seed-1", "fedavg", 1, [0.1], 0.2)
    federated_run(tmp_path / "b/runs/fedavg/seed-1", "fedavg", 1, [0.1], 0.4)
    federated_run(tmp_path / "b/runs/fedavg/seed-2", "fedavg", 2, [0.1], 0.6)
    federated_run(tmp_path / "c/runs/fedavg/seed-2", "fedavg", 2, [0.1], 0, status="failed", reason="x")
    (results,) = collect([tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "a"]).results
    assert results.arms[0].values("test_ndcg@10") == [0.4, 0.6]
    assert results.repeated == ["a/runs/fedavg/seed-1", "c/runs/fedavg/seed-2"]


def test_other_rows_of_the_same_data_set_are_other_results(tmp_path: Path) -> None:
    federated_run(tmp_path / "a", "fedavg", 1, [0.1], 0.2)
    federated_run(tmp_path / "b", "fedavg", 1, [0.1], 0.3, "dataset.clients.kind=taste")
    federated_run(tmp_path / "c", "fedhur", 1, [0.1], 0.3, "dataset.clients.kind=taste")
    named = {results.name: len(results.arms) for results in collect([tmp_path]).results}
    assert named == {"ml-100k (clients.kind=id)": 1, "ml-100k (clients.kind=taste)": 2}


def test_a_study_has_its_own_section_in_its_own_order(tmp_path: Path) -> None:
    page = collect([study(tmp_path / "relations")])
    (document,) = page.documents
    names = [(results.name, [arm.name for arm in results.arms]) for results in page.results_of(document.folder)]
    assert names == [
        ("ml-100k (clients.kind=id)", ["utility", "none"]),
        ("ml-100k (clients.kind=taste)", ["utility", "none"]),
    ]
    assert page.results_of(None) == []
    text = to_page(page)
    parsed = Parsed(text)
    words = " ".join(parsed.words)
    assert "<b>Which?</b>" in words
    assert "fedhur study relations" in words
    assert parsed.rows("none")[0] == ["none", "0.2"]
    # The picture of the text is not shown again, with its own title and caption; the other one is.
    images = parsed.of("img")
    assert [image["alt"] for image in images] == ['"quoted"', "curve"]
    assert images[0]["src"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert "Sweep <1>" in words
    assert [problem.where for problem in page.problems] == [str(tmp_path / "relations/../outside.png")]


def test_nothing_of_a_file_becomes_markup(tmp_path: Path) -> None:
    study(tmp_path / "relations")
    federated_run(tmp_path / "x", "fedavg", 1, [0.1], 0.2, status="failed", reason="</td><script>alert(4)</script>")
    text = to_page(collect([tmp_path]), command="fedhur report '<script>'")
    assert "alert(1)" in text
    assert "<script>alert" not in text
    parsed = Parsed(text)
    assert Counter(a.get("type") for a in parsed.of("script")) == {None: 1, "application/json": 2}
    assert not [attributes for _, attributes in parsed.elements if any(name.startswith("on") for name in attributes)]
    assert not parsed.of("b")


def test_data_for_the_script_cannot_end_its_element() -> None:
    content = {"a": "</script><!--<script>&"}
    text = script_json(content)
    assert not set("<>&") & set(text)
    assert json.loads(text) == content


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    study(tmp_path / "relations")
    (tmp_path / "relations/report.md").write_text("[a](https://example.org/) ![b](https://example.org/x.png)\n")
    text = to_page(collect([tmp_path]))
    parsed = Parsed(text)
    for tag, attributes in parsed.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "srcset", "poster", "data", "action", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith("data:")
        if tag != "a":
            assert (attributes.get("href") or "data:").startswith("data:")
        assert "style" not in attributes
    assert [a["href"] for a in parsed.of("a") if not str(a["href"]).startswith("#")] == ["https://example.org/"]
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for a in parsed.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert len(inside) == 1
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_ids_are_used_once_and_links_within_the_page_lead_somewhere(tmp_path: Path) -> None:
    study(tmp_path / "relations")
    study(tmp_path / "again" / "relations")
    federated_run(tmp_path / "x", "fedavg", 1, [0.1], 0.2)
    parsed = Parsed(to_page(collect([tmp_path])))
    ids = Counter(attributes["id"] for _, attributes in parsed.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    pointed = [str(a["href"])[1:] for a in parsed.of("a")]
    for _, attributes in parsed.elements:
        pointed += [*str(attributes.get("aria-labelledby") or "").split(), *filter(None, [attributes.get("for")])]
    assert set(pointed) <= set(ids)


def damage(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"{"),
        ("result.json", b"[1]"),
        ("result.json", b"\xff\xfe"),
        ("config.yaml", b"settings: ["),
        ("config.yaml", b"- a"),
        ("history.jsonl", b'{"round": 1}\n{"rou'),
        ("history.jsonl", b"[]\n"),
        ("history.jsonl", b'{"round": 1e400}\n'),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(comparison: Path, name: str, content: bytes) -> None:
    damage(comparison / "runs/fedavg/seed-1", name, content)
    page = collect([comparison])
    assert [problem.where for problem in page.problems] == [str(comparison / "runs/fedavg/seed-1" / name)]
    text = to_page(page)
    assert page.problems[0].where in text
    assert any("0.3500 ± 0.0707" in row for row in Parsed(text).rows("fedhur"))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"arms": 3, "figures": {"file": 1}, "tables": [1, {"file": 5}], "seeds": "x", "title": ["<"]}',
        '{"arms": [1, {"set": 4}], "figures": [{"file": "nothing.png"}], "tables": [{"file": "nothing.csv"}]}',
    ],
)
def test_a_damaged_study_keeps_its_runs(tmp_path: Path, content: str) -> None:
    folder = study(tmp_path / "relations")
    (folder / "study.json").write_text(content)
    page = collect([tmp_path])
    assert len(page.runs) == 8
    assert len(page.results) == 2
    Parsed(to_page(page))


def test_results_with_odd_values_do_not_end_the_page(tmp_path: Path) -> None:
    federated_run(tmp_path / "a", "fedavg", 1, [0.1], 0.2, test={"ndcg@10": None}, versions=7, bytes_up="many")
    federated_run(tmp_path / "b", "fedhur", 1, [0.1], 0.2, test=[1], seconds=True)
    worker = tmp_path / "c"
    worker.mkdir()
    (worker / "result.json").write_text('{"status": "completed", "strategy": "x", "dataset": "y", "seed": 5}')
    page = collect([tmp_path])
    assert [run.status for run in page.runs] == ["completed"] * 3
    assert "test_ndcg@10" not in page.runs[0].values
    Parsed(to_page(page))


def test_runs_of_a_search_are_not_results(tmp_path: Path) -> None:
    federated_run(tmp_path / "tune/trials/00000", "fedavg", 1, [0.1], 0.2)
    (tmp_path / "tune/trials.csv").write_text("number,value\n0,0.5\n")
    (tmp_path / "tune/summary.md").write_text("# Search of fedavg\n\nbest: trial 0\n")
    page = collect([tmp_path])
    assert page.runs == []
    assert [(document.kind, document.title) for document in page.documents] == [("tuning", "Search of fedavg")]


def many_runs(root: Path) -> Page:
    """120 runs of 300 rounds: 30 arms, four seeds."""
    for arm in range(30):
        for seed in range(1, 5):
            folder = root / "many" / f"{arm}-{seed}"
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(
                f"settings: {{seed: {seed}, strategy: fedavg, dataset: {{name: x}}, train: {{lr: 0.{arm + 1:03d}}}}}"
            )
            rows = [
                {"round": r, "validation": {"ndcg@10": arm / 100 + r / (r + 40) / 4 + seed / 500}}
                for r in range(1, 301)
            ]
            (folder / "history.jsonl").write_text("\n".join(map(json.dumps, rows)))
            result = {
                "status": "completed",
                "test": {"ndcg@10": arm / 100 + seed / 500},
                "bytes_up": 9,
                "bytes_down": 9,
            }
            (folder / "result.json").write_text(json.dumps(result))
    return collect([root / "many"])


def test_a_page_of_many_runs_stays_small_and_shows_the_best_arms_first(tmp_path: Path) -> None:
    page = many_runs(tmp_path)
    (results,) = page.results
    assert [len(arm.runs) for arm in results.arms] == [4] * 30
    text = to_page(page)
    assert len(text) < 1_000_000
    pressed = [a["aria-pressed"] for a in Parsed(text).of("button") if "aria-pressed" in a]
    assert pressed == ["true"] * SHOWN_LINES + ["false"] * (30 - SHOWN_LINES)


def test_a_thinned_line_keeps_its_ends_and_its_best_round() -> None:
    values = [0.1] * 1000
    values[701] = 0.9
    points = [(round_, value, value, value) for round_, value in enumerate(values, 1)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert kept == sorted(kept)
    assert {kept[0][0], kept[-1][0]} == {1, 1000}
    assert points[701] in kept
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_the_command_says_where_the_page_is_and_what_could_not_be_read(comparison: Path, tmp_path: Path) -> None:
    damage(comparison / "runs/fedavg/seed-1", "result.json", b"{")
    page = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(
        app, ["report", str(comparison), str(tmp_path / "nowhere"), "--output", str(page), "--title", "Our runs"]
    )
    assert done.exit_code == 0
    assert "5 runs, 0 studies, 0 other reports" in done.stdout
    assert re.search(rf"page: {re.escape(str(page))} \([\d.]+ KiB\)", done.stdout)
    assert f"{comparison / 'runs/fedavg/seed-1/result.json'}: cannot be read" in done.stderr
    assert f"{tmp_path / 'nowhere'}: there is no such folder" in done.stderr
    assert "<h1>Our runs</h1>" in page.read_text()


def test_no_page_is_made_of_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert not (tmp_path / "page.html").exists()


def test_only_ordinary_files_are_replaced(comparison: Path, tmp_path: Path) -> None:
    """A pipe stands for a device such as /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    for output, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is no ordinary file"),
        (tmp_path / f"{'x' * 300}.html", "File name too long"),
    ):
        done = CliRunner().invoke(app, ["report", str(comparison), "--output", str(output)])
        assert done.exit_code == 2
        assert said in done.stderr
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(FileExistsError, match="is no ordinary file and is not replaced"):
        write_text(tmp_path / "pipe", "text")


def test_the_question_of_a_study_stands_there_once(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": "wide", "title": "Width", "question": "How wide?"}))
    (folder / "report.md").write_text("# Width\n\nHow wide?\n\n- command: `fedhur study wide`\n\nHow wide? Very.\n")
    (document,) = collect([folder]).documents
    assert (document.title, document.question) == ("Width", "How wide?")
    assert document.text.strip() == "- command: `fedhur study wide`\n\nHow wide? Very."
