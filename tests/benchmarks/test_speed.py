"""`python -m benchmarks.speed` on small data: its parts sum to the round, and nothing is changed afterwards."""

import json
import re

import pytest
from flwr.app import Context, RecordDict

from benchmarks import probe, speed
from benchmarks.probe import CLIENT, FILES, SERIALISATION, SERVER, SHARES, share_of
from benchmarks.spans import Span, read_spans
from benchmarks.timed_runs import _app, client_seconds, round_times, run_config, timed_local
from fedhur_app.config import load_settings
from fedhur_app.flower_runner import app_folder
from fedhur_app.runtime import RUN_ID, LocalGrid
from server_app.stages import StageRunner
from tests.running import SMALL, history, numbers, run

OPTIONS = f"{SMALL} rounds=2 min_rounds=2 server.threads=1"


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timed")
    settings = load_settings("synthetic", "fedhur", 1, OPTIONS)
    return folder, timed_local(run_config("synthetic", settings, OPTIONS, folder), settings, folder)


def test_a_timed_run_has_the_numbers_of_any_other(timed, tmp_path):
    folder, _ = timed
    run(tmp_path, "fedhur", OPTIONS)
    assert numbers(folder / "run") == numbers(tmp_path)
    assert history(folder / "run") == history(tmp_path)


def test_the_parts_sum_to_the_round(timed):
    _, found = timed
    [round_] = found.rounds  # the first of two is the warm-up
    assert sum(round_.parts.values()) == pytest.approx(round_.seconds, rel=1e-9)
    assert sum(round_.shares.values()) == pytest.approx(round_.seconds, rel=1e-9)
    assert set(round_.shares) == set(SHARES)
    assert round_.workers == 1


def test_every_step_is_timed(timed):
    _, found = timed
    [round_] = found.rounds
    steps = {*probe.CLIENT_STEPS, *probe.SERVER_STEPS}
    assert steps <= set(round_.parts)
    assert all(round_.calls[step] >= round_.own[step] > 0 for step in steps)
    # Six clients in one thread: what one takes, six times, is their part of the round.
    assert 6 * client_seconds(found, "fit") == pytest.approx(round_.parts["fit"])
    # What the server itself says of a stage is what its call takes, and a bit around it.
    for stage, seconds in round_.stages.items():
        assert 0 < seconds <= round_.calls[f"call {stage}"]
    assert round_.calls["aggregate_items"] > round_.own["S_g and its eigenpairs"] + round_.own["item groups"]


def test_the_tables_of_the_last_round_are_kept(timed):
    _, found = timed
    assert {client: tuple(table.shape) for client, table in found.uploads.items()} == dict.fromkeys(range(6), (80, 8))


def test_no_function_stays_wrapped(timed):
    assert not hasattr(StageRunner.call, "__wrapped__")


def test_shares_of_what_is_timed():
    kinds = {
        "fit": CLIENT,
        "Ray's pickling": SERIALISATION,
        "server's files": FILES,
        "energies": SERVER,
        "round": SERVER,
    }
    assert {name: share_of(name) for name in kinds} == kinds


def test_workers_side_by_side_share_a_stage():
    # A round of 10 s on the server s: 6 s of one stage with two workers, one of which starts after 2 s.
    spans = [
        Span("round", "s", 0, 10, 4),
        Span("call train.items", "s", 2, 8, 6),
        Span(probe.MESSAGE, "1/1", 2, 8, 6),
        Span(probe.MESSAGE, "2/1", 4, 8, 1),
        Span("training", "2/1", 4, 7, 3),
    ]
    [found] = round_times(spans, [{"seconds": {"stages": {"train.items": 6}}}])
    assert found.workers == 2
    assert found.parts == pytest.approx({"round": 4, probe.MESSAGE: 3.5, "training": 1.5, "waiting": 1})
    with pytest.raises(ValueError, match=r"2 rounds, but 1 were timed.*fecosr\.asynchronous"):
        round_times(spans, [{}, {}])


def test_the_app_for_flower_records_itself(tmp_path, monkeypatch):
    """The halves that run under Flower, here in one process."""
    (tmp_path / "spans").mkdir()
    settings = load_settings("synthetic", "fedhur", 1, OPTIONS)
    config = run_config("synthetic", settings, OPTIONS, tmp_path)
    monkeypatch.setenv(probe.FOLDER, str(tmp_path / "spans"))
    monkeypatch.setenv(probe.ALGORITHM, settings.algorithm)
    try:
        probe.server(LocalGrid(probe.client, 6, config), Context(RUN_ID, RUN_ID, {}, RecordDict(), config))
    finally:  # under Flower the process ends
        probe._record_client().close()
        probe._record_client.cache_clear()
        probe._recorder.cache_clear()
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    first, last = round_times(read_spans(tmp_path / "spans"), lines)
    assert sum(last.parts.values()) == pytest.approx(last.seconds)
    assert {"fit", "training", "energies", "records to tensors, clients"} <= set(last.parts)
    assert first.workers == last.workers == 1


def test_flower_finds_the_app(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    folder = _app(tmp_path, app_folder())
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    own, _ = load_and_validate(app_folder() / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["config"] == own["tool"]["flwr"]["app"]["config"]


def test_the_command_writes_its_report(tmp_path, capsys):
    speed.main(["--quick", "--output", str(tmp_path / "speed.md"), "--seed", "2"])
    text = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "python -m benchmarks.speed --quick" in text
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [
        "Seconds by stage",
        "Shares of a round",
        "The naive form",
        "What bounds each step",
    ]
    for stage in ("train.items", "query.utility", "train.personalize"):
        assert f"| **{stage}** | 0." in text
    assert re.search(r"^\| fit \| \S+ \| \S+ \| \S+ \| .*2 of 6 clients", text, re.MULTILINE)
    assert re.search(r"^- fit: \S+ kFLOP and \S+ kB a client, \S+ ms at the measured rate", text, re.MULTILINE)


def test_a_strategy_without_a_naive_form_says_so(capsys):
    speed.main(["--quick", "--strategy", "fedavg", "--set", "server.threads=1"])
    text = capsys.readouterr().out
    assert "None is written for these settings" in text
    assert "| **train.personalize** | 0." in text
    assert "one process, s" not in text  # the run with one thread is the run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "1"], "there must be at least 2"),
        (["--runtimes", "local,ray"], "--runtimes has ray"),
        (["--set", "model.width=3"], "width"),
    ],
)
def test_what_cannot_be_measured_is_said(words, message):
    with pytest.raises(SystemExit, match=message):
        speed.main(["--quick", *words])
