import numpy as np
import pytest

from fedhur_app.protocol import Stage
from fedhur_app.studies.workers import dropouts
from tests.running import SMALL, history, result


def words(output, drop, *options):
    changes = f"{SMALL} rounds=3 min_rounds=1 server.quorum=0.1".split()
    return [
        *("--dataset", "synthetic", "--strategy", "fedhur", "--seed", "3", "--output", str(output)),
        *(word for change in changes for word in ("--set", change)),
        *("--drop", str(drop), *options),
    ]


def test_requests_are_lost_at_the_given_rate_and_always_the_same_ones():
    lost = [dropouts.is_lost(1, Stage.ITEMS, round_, client, 0.3) for round_ in range(1, 101) for client in range(100)]
    assert np.mean(lost) == pytest.approx(0.3, abs=3 * np.sqrt(0.3 * 0.7 / 10_000))
    assert lost[:50] == [dropouts.is_lost(1, Stage.ITEMS, 1, client, 0.3) for client in range(50)]
    for other in ((2, Stage.ITEMS, 1), (1, Stage.UTILITY, 1), (1, Stage.ITEMS, 2)):
        assert lost[:50] != [dropouts.is_lost(*other, client, 0.3) for client in range(50)]


@pytest.mark.parametrize("stage", [Stage.HELLO, Stage.RANK, Stage.CHECKPOINT])
def test_the_handshake_the_test_and_checkpoints_are_never_lost(stage):
    assert not any(dropouts.is_lost(1, stage, 1, client, 0.99) for client in range(200))


def test_a_run_misses_exactly_those_clients(tmp_path):
    dropouts.main(words(tmp_path / "run", 0.3))
    asked = set(range(6))
    for line in history(tmp_path / "run"):
        there = set(asked)
        for stage, told in line["stages"].items():
            lost = {client for client in there if dropouts.is_lost(3, stage, line["round"], client, 0.3)}
            assert {int(client) for client in told["absent"]} == lost
            there -= lost
    assert result(tmp_path / "run")["status"] == "completed"
    assert result(tmp_path / "run")["absent_at_test"] == {}
    assert any(told["absent"] for line in history(tmp_path / "run") for told in line["stages"].values())


@pytest.mark.parametrize("drop", [-0.1, 1.0])
def test_an_impossible_share_is_refused(tmp_path, drop):
    with pytest.raises(ValueError, match="--drop"):
        dropouts.main(words(tmp_path / "run", drop))
