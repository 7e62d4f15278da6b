import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedhur_app.config import ConfigError
from fedhur_app.reporting.market_numbers import MarketStudy
from fedhur_app.reporting.markets import write_market_report
from fedhur_app.reporting.outcomes import Outcome
from tests.reporting.folders import item_tables, market_run

# Market 0 (us) has four users, market 1 (de) two.
ALONE = {0: [0.4, 0.4, 0.4, 0.4], 1: [0.5, 0.5]}
SHARED = {
    1: {0: [0.6, 0.4, 0.5, 0.3], 1: [0.4, 0.5]},  # +12.5 %, -10 %
    2: {0: [0.6, 0.4, 0.7, 0.3], 1: [0.3, 0.4]},  # +25 %, -30 %
}
DIFFERENCES = {0: [0.2, 0.0, 0.2, -0.1], 1: [-0.15, -0.05]}  # of users, mean over both seeds


def two_seeds(root: Path, dataset: str = "ml-100k", fingerprints: tuple[str, str] = ("same", "same")) -> list[Outcome]:
    return [
        outcome
        for seed, fingerprint in zip((1, 2), fingerprints, strict=True)
        for outcome in (
            market_run(root, "local", seed, ALONE, dataset, fingerprint),
            market_run(root, "fedavg", seed, SHARED[seed], dataset, fingerprint),
        )
    ]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_changes_are_relative_and_over_seeds(tmp_path: Path) -> None:
    study = MarketStudy(two_seeds(tmp_path), "local")
    (us,), (de,) = study.changes(0), study.changes(1)
    assert (us.method, us.relative.n, us.relative.mean) == ("fedavg", 2, pytest.approx(18.75))
    # Student's t with one degree of freedom is Cauchy's; half the distance of the two values is 6.25.
    assert us.relative.high - us.relative.mean == pytest.approx(math.tan(0.475 * math.pi) * 6.25)
    assert de.relative.mean == pytest.approx(-20)
    assert (us.lose, us.win) == (0.25, 0.5)
    assert (de.lose, de.win) == (1.0, 0.0)


def test_users_are_tested_by_their_mean_difference(tmp_path: Path) -> None:
    study = MarketStudy(two_seeds(tmp_path), "local")
    for market, differences in DIFFERENCES.items():
        (change,) = study.changes(market)
        assert (change.test.n, change.test.difference) == (len(differences), pytest.approx(np.mean(differences)))
        assert change.t_holm == change.test.t_p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)


def test_holm_is_over_the_methods_of_a_market(tmp_path: Path) -> None:
    outcomes = two_seeds(tmp_path)
    better = {0: [0.5, 0.6, 0.7, 0.8], 1: [0.5, 0.5]}
    outcomes += [market_run(tmp_path, "fedca", seed, better) for seed in (1, 2)]
    study = MarketStudy(outcomes, "local")
    found = {change.method: change for change in study.changes(0)}
    raw = {
        "fedavg": stats.ttest_1samp(DIFFERENCES[0], 0).pvalue,
        "fedca": stats.ttest_1samp([0.1, 0.2, 0.3, 0.4], 0).pvalue,
    }
    assert raw["fedca"] < raw["fedavg"]
    assert found["fedca"].t_holm == pytest.approx(2 * raw["fedca"])
    assert found["fedavg"].t_holm == pytest.approx(max(raw["fedavg"], 2 * raw["fedca"]))
    same = {change.method: change for change in study.changes(1)}["fedca"]
    assert (same.relative.mean, same.lose, same.win, same.test.wilcoxon_p) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(("dataset", "fingerprints"), [("synthetic", ("a", "a")), ("ml-100k", ("a", "b"))])
def test_users_of_data_drawn_anew_are_paired_within_seeds(
    dataset: str, fingerprints: tuple[str, str], tmp_path: Path
) -> None:
    outcomes = two_seeds(tmp_path, dataset, fingerprints)
    study = MarketStudy(outcomes, "local")
    (us,) = study.changes(0)
    pooled = [0.2, 0, 0.1, -0.1, 0.2, 0, 0.3, -0.1]
    assert us.test.n == 8
    assert us.test.t_p == pytest.approx(stats.ttest_1samp(pooled, 0).pvalue)
    assert (us.lose, us.win) == (0.25, 0.5)
    assert "drawn anew for every seed" in write_market_report(outcomes, tmp_path / "out")


def test_a_seed_without_the_reference_has_no_change(tmp_path: Path) -> None:
    outcomes = two_seeds(tmp_path)
    outcomes[2] = Outcome(outcomes[2].run, "failed", "no luck")
    study = MarketStudy(outcomes, "local")
    (us,) = study.changes(0)
    assert (us.relative.n, us.relative.mean, us.test.difference) == (1, pytest.approx(12.5), pytest.approx(0.05))
    assert study.summary("fedavg", 0, "ndcg").n == 2
    assert "- local seed 2 failed and is left out: no luck" in write_market_report(outcomes, tmp_path / "out")


def test_the_report_has_a_table_a_market_and_one_of_all(tmp_path: Path) -> None:
    text = write_market_report(two_seeds(tmp_path), tmp_path / "out")
    assert text == (tmp_path / "out" / "report.md").read_text()
    assert "Market us (4 test users), the rich market: a loss here is source degradation:" in text
    assert "Market de (2 test users): a loss here is negative transfer:" in text
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert lines[0][:6] == ["method", "seeds", "Recall@10", "NDCG@10", "MRR@10", "AUC"]
    us_alone, us, de_alone, de, every = lines[2], lines[3], lines[6], lines[7], lines[10]
    assert us_alone == ["local", "2", "0.8000 ± 0.0000", "0.4000 ± 0.0000", *["0.8000 ± 0.0000"] * 2, *["-"] * 6]
    assert us[3] == "**0.4750 ± 0.0354**"  # 0.45 and 0.5
    assert us[6:8] == ["+18.75", "[-60.66, +98.16]"]
    assert us[10:] == ["25.0", "50.0"]
    assert de_alone[3] == "**0.5000 ± 0.0000**"
    assert (de[6], de[10:]) == ("-20.00", ["100.0", "0.0"])
    assert every == ["fedavg", "+18.75", "no", "-20.00", "1 of 1", "0"]
    assert r"\begin{tabular}" in (tmp_path / "out" / "report.tex").read_text()


def test_significant_losses_are_counted(tmp_path: Path) -> None:
    alone, worse = {0: [0.5] * 9, 1: [0.5] * 8}, {0: [0.4, 0.41, 0.42] * 3, 1: [0.3, 0.31] * 4}
    outcomes = [market_run(tmp_path, "local", 1, alone), market_run(tmp_path, "fedavg", 1, worse)]
    every = cells(write_market_report(outcomes, tmp_path / "out").split("All markets")[1].splitlines()[4])
    assert every == ["fedavg", "-18.00", "yes", "-39.00", "1 of 1", "1"]


def test_csv_files_hold_every_number(tmp_path: Path) -> None:
    write_market_report(two_seeds(tmp_path), tmp_path)
    values = {
        (row["market"], row["method"], row["seed"], row["metric"]): float(row["value"])
        for row in rows_of(tmp_path / "markets.csv")
    }
    assert values["us", "fedavg", "1", "ndcg"] == pytest.approx(0.45)
    assert values["de", "fedavg", "2", "auc"] == pytest.approx(0.7)
    assert values["de", "local", "2", "users"] == 2
    changes = {(row["market"], row["rich"]): row for row in rows_of(tmp_path / "changes.csv")}
    assert set(changes) == {("us", "1"), ("de", "0")}
    assert float(changes["de", "0"]["change_percent"]) == pytest.approx(-20)
    history = [tuple(row.values()) for row in rows_of(tmp_path / "history.csv") if row["method"] == "local"]
    assert history[:3] == [
        ("local", "1", "us", "1", "ndcg@10", "0.4"),
        ("local", "1", "us", "2", "ndcg@10", "0.8"),
        ("local", "1", "de", "2", "ndcg@10", "1.0"),
    ]
    assert (tmp_path / "curves.png").is_file()


def test_a_data_set_without_markets_is_refused(tmp_path: Path) -> None:
    outcomes = two_seeds(tmp_path)
    for outcome in outcomes:
        del outcome.users["market"]
    with pytest.raises(ConfigError, match="data set ml-100k has no markets"):
        write_market_report(outcomes, tmp_path / "out")


def test_no_run_completed(tmp_path: Path) -> None:
    outcomes = [Outcome(outcome.run, "failed", "no luck") for outcome in two_seeds(tmp_path)]
    text = write_market_report(outcomes, tmp_path / "out")
    assert "|" not in text
    assert text.count("no luck") == 4
    assert rows_of(tmp_path / "out" / "changes.csv") == []


def with_tables(root: Path, shared: np.ndarray) -> list[Outcome]:
    outcomes = [*two_seeds(root), market_run(root, "pfedrec", 1, ALONE, algorithm="fecosr")]
    tables = {0: np.zeros((3, 2)), 1: np.tile([2.0, 0.0], (3, 1))}
    item_tables(outcomes[-1].run.folder, tables, shared)
    return outcomes


def test_the_global_table_is_placed_between_the_markets(tmp_path: Path) -> None:
    text = write_market_report(with_tables(tmp_path, np.tile([0.5, 0.0], (3, 1))), tmp_path)
    rows = [cells(line) for line in text.split("How far")[1].splitlines() if line.startswith("|")][2:]
    assert rows == [["us", "0.5000", "2.0000", "0.250"], ["de", "1.5000", "2.0000", "0.750"]]
    assert (tmp_path / "tables.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "tables.pdf").read_bytes().startswith(b"%PDF")


def test_tables_of_different_widths_are_not_drawn(tmp_path: Path) -> None:
    text = write_market_report(with_tables(tmp_path, np.zeros((3, 4))), tmp_path)
    assert "different widths (us 2, de 2, global 4)" in text
    assert not (tmp_path / "tables.png").exists()
