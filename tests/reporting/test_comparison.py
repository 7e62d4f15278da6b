import csv
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedhur_app.config import load_settings
from fedhur_app.reporting.comparison import paired_tests, write_report
from fedhur_app.reporting.outcomes import Outcome, Run
from fedhur_app.reporting.tables import latex_text


def outcome(
    strategy: str,
    seed: int,
    ndcg: float,
    users: dict[int, float] | None = None,
    dataset: str = "synthetic",
    **more: Any,
) -> Outcome:
    """A completed run; recall and mrr are the same as ndcg."""
    run = Run(dataset, strategy, seed, load_settings(dataset, "local", seed), Path(strategy) / str(seed))
    arrays = {}
    if users:
        values = np.array(list(users.values()))
        arrays = {"user": np.array(list(users)), "ndcg": values, "recall": values, "mrr": values}
    values_ = {f"{part}_{name}@10": ndcg for part in ("validation", "test") for name in ("ndcg", "recall", "mrr")}
    return Outcome(run, "completed", "", values_ | {"seconds": 2.0, "bytes_up": 2**20}, arrays, **more)


def invented() -> list[Outcome]:
    scores = {"a": [0.5, 0.6, 0.9], "b": [0.4, 0.5, 0.6], "c": [0.1, 0.3, 0.1], "d": [0.1, 0.1, 0.2]}
    return [outcome(name, seed, values[seed]) for seed in range(3) for name, values in scores.items()]


def test_everyone_meets_the_best_of_the_others_and_holm_counts_each_pair_once() -> None:
    found = {c.strategy: c for c in paired_tests(invented()) if (c.metric, c.level) == ("ndcg@10", "seeds")}
    assert {name: c.against for name, c in found.items()} == {"a": "b", "b": "a", "c": "a", "d": "a"}
    raw = {
        "b": stats.ttest_rel([0.5, 0.6, 0.9], [0.4, 0.5, 0.6]).pvalue,  # 0.18, the largest of three
        "c": stats.ttest_rel([0.1, 0.3, 0.1], [0.5, 0.6, 0.9]).pvalue,
        "d": stats.ttest_rel([0.1, 0.1, 0.2], [0.5, 0.6, 0.9]).pvalue,  # 0.03, the smallest
    }
    assert raw["d"] < raw["c"] < raw["b"]
    corrected = {"d": 3 * raw["d"], "c": max(2 * raw["c"], 3 * raw["d"])}
    corrected["b"] = corrected["a"] = max(raw["b"], corrected["c"])
    assert {name: c.t_holm for name, c in found.items()} == pytest.approx(corrected, rel=1e-9)
    assert found["a"].test.difference == pytest.approx(0.5 / 3)
    assert found["b"].test.difference == pytest.approx(-0.5 / 3)
    assert {c.test.wilcoxon_p for c in found.values()} == {0.25}
    assert {c.wilcoxon_holm for c in found.values()} == {0.75}


def test_only_seeds_that_both_completed_are_paired() -> None:
    outcomes = [outcome("a", seed, score) for seed, score in ((1, 0.5), (2, 0.6), (3, 0.9))]
    outcomes += [outcome("b", seed, score) for seed, score in ((2, 0.1), (3, 0.3), (4, 0.4))]
    outcomes.append(Outcome(outcome("b", 1, 0.0).run, "failed", "no luck"))
    first = next(c for c in paired_tests(outcomes) if (c.metric, c.level, c.strategy) == ("ndcg@10", "seeds", "a"))
    assert first.test.n == 2
    assert first.test.difference == pytest.approx((0.5 + 0.6) / 2)


def test_users_are_averaged_over_the_seeds_in_which_both_tested_them() -> None:
    outcomes = [
        outcome("a", 1, 0.9, {1: 1.0, 2: 0.5}), outcome("b", 1, 0.1, {1: 0.5, 2: 0.5}),
        outcome("a", 2, 0.9, {1: 0.5, 3: 1.0}), outcome("b", 2, 0.1, {1: 0.25, 2: 1.0, 3: 0.0}),
    ]  # fmt: skip
    users = [c for c in paired_tests(outcomes) if (c.metric, c.level) == ("recall@10", "users")]
    assert [c.test.n for c in users] == [3, 3]
    differences = [(0.5 + 0.25) / 2, 0.0, 1.0]
    assert users[0].test.difference == pytest.approx(np.mean(differences))
    assert users[0].test.t_p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)


def test_equal_strategies_have_p_1_and_a_single_seed_has_none() -> None:
    equal = [outcome(name, seed, 0.1 * seed) for name in ("a", "b") for seed in (1, 2)]
    seeds = [c for c in paired_tests(equal) if c.level == "seeds"]
    assert {(c.test.t_p, c.test.wilcoxon_p, c.t_holm, c.wilcoxon_holm) for c in seeds} == {(1.0, 1.0, 1.0, 1.0)}
    for c in paired_tests(equal[:1] + equal[2:3]):
        assert math.isnan(c.test.t_p)
        assert math.isnan(c.wilcoxon_holm)
    assert paired_tests(equal[:2]) == []


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_best_of_a_column_is_bold_in_markdown_and_latex(tmp_path: Path) -> None:
    text = write_report(invented(), tmp_path)
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["strategy", "seeds", "ndcg@10", "recall@10", "mrr@10"]
    assert lines[2] == ["a", "3", *["**0.6667 ± 0.2082**"] * 3]
    assert lines[3] == ["b", "3", *["0.5000 ± 0.1000"] * 3]
    cost = lines[[line[2:3] for line in lines].index(["MiB up"]) + 2]
    assert cost[2:5] == ["**1.00 ± 0.00**", "-", "-"]  # all are equally good; what is missing is not
    latex = (tmp_path / "table.tex").read_text()
    assert r"a & 3 & \textbf{0.6667 $\pm$ 0.2082} &" in latex
    assert "$-$0.1667" in latex


def test_the_latex_has_whole_rows_and_no_special_character_is_left(tmp_path: Path) -> None:
    odd = r"a_b&c%d$e#f{g}h~i^j\k<l>m|n"
    outcomes = [outcome(odd, 1, 0.5), outcome("b", 1, 0.25)]
    outcomes.append(Outcome(outcome(odd, 2, 0).run, "failed", "100 % of `x` → [1_2]"))
    text = write_report(outcomes, tmp_path)
    assert "100 % of `x` → [1_2]" in text
    lines = (tmp_path / "table.tex").read_text().splitlines()
    columns = 0
    for line in lines[1:]:  # the first is a comment
        if found := re.fullmatch(r"\\noindent\\begin\{tabular\}\{([lr]+)\}", line):
            columns = len(found[1])
        elif line.endswith(r" \\"):
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1
            assert not re.search(r"(?<!\\)[%#_]", line)
            assert not re.search(r"[~^<>|]", line)
        assert len(re.findall(r"(?<!\\)\{", line)) == len(re.findall(r"(?<!\\)\}", line))
        assert line.isascii()
    assert (
        r"a\_b\&c\%d\$e\#f\{g\}h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k\textless{}l\textgreater{}m"
        r"\textbar{}n & 1 & \textbf{0.5000} &"
    ) in "\n".join(lines)
    assert any(r"100 \% of 'x' ? [1\_2]" in line for line in lines)
    assert latex_text("Zoë −") == "Zoë ?"


def test_a_reader_is_told_what_the_tables_cannot_show(tmp_path: Path) -> None:
    outcomes = [outcome("a", 1, 0.5, code="x", absent=2), outcome("b", 1, 0.25, code="y")]
    text = write_report([*outcomes, Outcome(outcome("b", 2, 0).run, "not run")], tmp_path)
    assert "- a seed 1: 2 clients did not answer at the test." in text
    assert "not all made by the same version of the code" in text
    assert "- These runs have not been made: b seed 2." in text
    assert "A p value of - is a test that cannot be made" in text
    assert "2^(1-" not in text
    assert "**-**" not in text  # one seed has no interval, so none is the best


@pytest.mark.parametrize(
    ("dataset", "anew"),
    [("synthetic", True), ("markets-synthetic", True), ("ml-100k", False), ("markets-ml-100k", False)],
)
def test_a_reader_is_told_whether_the_users_are_others_with_every_seed(
    tmp_path: Path, dataset: str, anew: bool
) -> None:
    outcomes = [outcome(name, seed, 0.1 * seed, dataset=dataset) for name in ("a", "b") for seed in (1, 2)]
    assert ("drawn anew for every seed" in write_report(outcomes, tmp_path)) == anew


def test_a_metric_over_nobody_is_left_empty(tmp_path: Path) -> None:
    outcomes = [outcome("a", 1, 0.5), outcome("b", 1, 0.25)]
    del outcomes[1].values["test_ndcg@10"]
    assert cells(write_report(outcomes, tmp_path).splitlines()[6])[:3] == ["a", "1", "0.5000"]
    assert list(csv.DictReader((tmp_path / "results.csv").open()))[1]["test_ndcg@10"] == ""
    assert {c.metric for c in paired_tests(outcomes)} == {"recall@10", "mrr@10"}
