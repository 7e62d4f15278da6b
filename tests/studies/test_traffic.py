import math

import numpy as np
import pytest

from fedhur_app.studies import traffic


def line(clients: int, up: float, down: float, value: float | None) -> dict:
    stages = {
        "train.items": {"bytes_up": {"table": up * 2**20, "fields": 0}, "bytes_down": {"fields": down * 2**20 / 2}},
        "train.personalize": {"bytes_up": {}, "bytes_down": {"filter": down * 2**20 / 2}},
    }
    return {"clients": clients, "stages": stages, "validation": {"ndcg@10": value}}


ONE = [line(4, 2, 1, 0.3), line(2, 1, 1, 0.2), line(4, 2, 1, 0.4)]
TWO = [line(4, 6, 2, None), line(4, 6, 2, 0.5)]


def test_bytes_by_record_are_means_over_clients_and_rounds():
    mib = 2**20
    assert traffic.by_record([ONE]) == pytest.approx(
        {
            ("train.items", "up", "table"): mib * (2 / 4 + 1 / 2 + 2 / 4) / 3,
            ("train.items", "up", "fields"): 0,
            ("train.items", "down", "fields"): mib * (0.5 / 4 + 0.5 / 2 + 0.5 / 4) / 3,
            ("train.personalize", "down", "filter"): mib * (0.5 / 4 + 0.5 / 2 + 0.5 / 4) / 3,
        }
    )
    both = traffic.by_record([ONE, TWO])
    assert both["train.items", "up", "table"] == pytest.approx(mib * (2 / 4 + 1 / 2 + 2 / 4 + 6 / 4 + 6 / 4) / 5)
    assert traffic.by_record([]) == {}


def test_a_budget_buys_the_best_round_that_it_covers():
    assert traffic.spent(ONE).tolist() == [3, 5, 8]
    best = {2.9: None, 3: 0.3, 5: 0.3, 7.9: 0.3, 8: 0.4, 100: 0.4}
    for budget, expected in best.items():
        value = traffic.within(ONE, "ndcg@10", budget)
        assert math.isnan(value) if expected is None else value == expected
    assert np.isnan(traffic.best_so_far(TWO, "ndcg@10")).tolist() == [True, False]


def test_budgets_are_powers_of_two_from_the_cheapest_round_to_the_dearest_run():
    assert traffic.budgets([ONE, TWO]) == [4, 8, 16]
    assert traffic.budgets([[line(1, 0, 0, 0.1)], []]) == []
