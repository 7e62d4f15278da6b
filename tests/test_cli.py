import io
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fedhur_app import cli, flower_runner
from fedhur_app.cli import HistoryFollower, LiveView, app, new_settings, show_result
from fedhur_app.config import load_settings
from fedhur_app.flower_runner import FlowerOutcome

RESULT: dict[str, Any] = {
    "status": "completed",
    "dataset": "synthetic",
    "strategy": "fedavg",
    "seed": 1,
    "rounds": 12,
    "best_round": 9,
    "validation": {"ndcg@10": 0.3, "hit@10": 0.7},
    "test": {"recall@10": 0.25, "ndcg@10": 0.31416, "hit@10": 0.71},
    "users_evaluated": 196,
    "bytes_up": 3 * 2**20,
    "bytes_down": 2048,
    "seconds": 61.25,
    "peak_memory_mib": {"server": 512.4, "client": None},
    "versions": {},
}
FAILED: dict[str, Any] = {
    "status": "failed",
    "reason": "only 2 of 10 clients answered",
    "seconds": 1.0,
    "versions": {},
}
OPTIONS = ["--dataset", "synthetic", "--strategy", "fedavg"]
COMPLETED = FlowerOutcome(1, "finished:completed", "", True)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def history_line(round_: int, ndcg: float) -> str:
    return json.dumps({"round": round_, "validation": {"ndcg@10": ndcg}, "best_round": round_}) + "\n"


class FakeFlower:
    """Stands for `run_flower`: notes its arguments, plays the app's files and lines."""

    def __init__(
        self, outcome: FlowerOutcome | BaseException = COMPLETED, result: dict[str, Any] | None = RESULT
    ) -> None:
        self.outcome = outcome
        self.result = result
        self.arguments: dict[str, Any] = {}

    def __call__(
        self, run_config: dict[str, Any], num_supernodes: int, *, on_line: Callable[[str], None], **more: Any
    ) -> FlowerOutcome:
        self.arguments = {"run_config": run_config, "num_supernodes": num_supernodes, **more}
        folder = Path(run_config["output-dir"])
        on_line("INFO :      Starting Flower Simulation")
        on_line("INFO :      fedhur | round 1/3 | train.items | 10/10 clients")
        (folder / "history.jsonl").write_text(history_line(1, 0.25))
        if self.result is not None:
            (folder / "result.json").write_text(json.dumps(self.result))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> FakeFlower:
    fake = FakeFlower()
    monkeypatch.setattr(flower_runner, "run_flower", fake)
    monkeypatch.setattr(flower_runner, "client_resources", lambda device, clients: (1, 0.25))
    return fake


def earlier_run(folder: Path, **changes: Any) -> Path:
    """An output folder as a run leaves it."""
    settings = load_settings("synthetic", "fedavg", 3, changes)
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings.to_yaml())
    return folder


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['fedhur', '--help']\n"
        "from fedhur_app import cli\n"
        "try: cli.main()\n"
        "finally: print([name for name in ('torch', 'flwr', 'numpy', 'ray') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    folder = flower_runner.app_folder()
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "strategies" in shown
    assert shown.splitlines()[-1] == "[]"


def test_version() -> None:
    shown = invoke("--version")
    assert shown.exit_code == 0
    assert re.fullmatch(r"fedhur \d+\.\d+\.\d+\n", shown.output)


def test_strategies_are_listed_with_their_first_comment() -> None:
    shown = invoke("strategies")
    assert shown.exit_code == 0
    assert re.search(r"^fedcia +FedCIA: the mean Gram matrix", shown.output, re.MULTILINE)
    assert re.search(r"^fedavg", shown.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--dataset", "ml-10k"], "unknown dataset 'ml-10k'; did you mean 'ml-100k'?"),
        (["--strategy", "fedhurr"], "unknown strategy 'fedhurr'; did you mean 'fedhur'?"),
        (["--set", "train.lrr=1"], "unknown setting 'train.lrr'; did you mean 'train.lr'?"),
        (["--set", "train.lr=fast"], "setting 'train.lr' is 'fast'"),
        (["--set", "train.lr"], "'train.lr' is not of the form section.key=value"),
        (["--set", "rounds=3"], "min_rounds (5) is above rounds (3)"),
    ],
)
def test_wrong_settings_are_one_line_and_status_2(options: list[str], text: str, tmp_path: Path) -> None:
    shown = invoke("run", *options)
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert text in shown.output
    assert shown.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_rounds_lower_min_rounds_too_and_only_where_needed() -> None:
    settings, overrides = new_settings("synthetic", "fedavg", 1, 2, [])
    assert (settings.rounds, settings.min_rounds) == (2, 2)
    assert overrides == "rounds=2 min_rounds=2"
    settings, overrides = new_settings("synthetic", "fedavg", 1, 50, ["min_rounds=40"])
    assert (settings.rounds, settings.min_rounds) == (50, 40)
    assert overrides == "min_rounds=40 rounds=50"


def test_overrides_survive_quoting() -> None:
    changes = ["hierarchy.branching=[3, 2]", "residual.beta=[1, 1]", "residual.inherit=null"]
    settings, overrides = new_settings("synthetic", "fedhur", 1, None, changes)
    assert settings.hierarchy.branching == [3, 2]
    assert shlex.split(overrides) == changes
    assert load_settings("synthetic", "fedhur", 1, overrides) == settings


def test_a_completed_run_shows_its_table(flower: FakeFlower, tmp_path: Path) -> None:
    shown = invoke("run", *OPTIONS, "--seed", "4", "--rounds", "3", "--output", "out put", "--set", "train.lr=0.2")
    assert shown.exit_code == 0, shown.output
    folder = tmp_path / "out put"
    assert flower.arguments["run_config"] == {
        "dataset": "synthetic",
        "strategy": "fedavg",
        "seed": 4,
        "overrides": "train.lr=0.2 rounds=3 min_rounds=3",
        "output-dir": str(folder),
        "resume": "",
    }
    assert flower.arguments["num_supernodes"] == 10
    assert flower.arguments["cpus_per_client"] == 1
    assert flower.arguments["gpus_per_client"] == 0.25
    assert shown.output.count(f"output: {folder}\n") == 2
    assert "round 1/3 | train.items | 10/10 clients" in shown.output
    assert "Starting Flower" not in shown.output
    assert "0.3142" in shown.output
    assert "Starting Flower" in (folder / "run.log").read_text()


def test_one_user_a_client_asks_the_data_for_their_number(flower: FakeFlower) -> None:
    changes = ["--set", "dataset.clients.kind=one-user", "--set", "dataset.synthetic.users=23"]
    assert invoke("run", *OPTIONS, *changes).exit_code == 0
    assert flower.arguments["num_supernodes"] == 23


def test_the_default_output_names_the_run(flower: FakeFlower, tmp_path: Path) -> None:
    assert invoke("run", *OPTIONS).exit_code == 0
    folder = Path(flower.arguments["run_config"]["output-dir"])
    assert folder.parent == tmp_path / "runs"
    assert re.fullmatch(r"synthetic-fedavg-seed1-\d{8}T\d{6}Z", folder.name)


def test_verbose_shows_everything(flower: FakeFlower) -> None:
    assert "Starting Flower Simulation" in invoke("run", *OPTIONS, "--verbose").output


@pytest.mark.parametrize(
    ("outcome", "result", "text"),
    [
        (COMPLETED, None, "the run failed: it ended without writing a result"),
        (COMPLETED, FAILED, "the run failed: only 2 of 10 clients answered"),
        (FlowerOutcome(1, "finished:failed", "no luck", True), None, "the run failed: no luck"),
        (FlowerOutcome(1, "finished:failed", "", True), RESULT, "Flower ended with status finished:failed"),
        (FlowerOutcome(1, "finished:completed", "", False), RESULT, "the run failed: "),
        (flower_runner.FlowerError("no SuperLink"), None, "the run failed: no SuperLink"),
    ],
)
def test_a_failed_run_says_why_and_where_the_log_is(
    flower: FakeFlower, tmp_path: Path, outcome: Any, result: dict[str, Any] | None, text: str
) -> None:
    flower.outcome, flower.result = outcome, result
    shown = invoke("run", *OPTIONS, "--output", "out")
    assert shown.exit_code == 1
    assert text in shown.output
    assert f"log: {tmp_path / 'out' / 'run.log'}" in shown.output
    assert "Starting Flower Simulation" in shown.output  # what was hidden may explain it


def test_an_unexpected_error_keeps_its_traceback(flower: FakeFlower) -> None:
    flower.outcome, flower.result = ZeroDivisionError("a bug"), None
    assert isinstance(invoke("run", *OPTIONS).exception, ZeroDivisionError)


def test_ctrl_c_is_status_130_and_tells_how_to_continue(flower: FakeFlower, tmp_path: Path) -> None:
    flower.outcome, flower.result = KeyboardInterrupt(), FAILED
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint" / "server.npz").write_bytes(b"")
    shown = invoke("run", *OPTIONS, "--output", "out")
    assert shown.exit_code == 130
    assert f"--resume {tmp_path / 'out'}" in shown.output
    assert "failed" not in shown.output


def test_the_local_runtime_shows_the_same_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from flwr.common.logger import FLOWER_LOGGER, log

    from fedhur_app import runtime

    def run_local(run_config: dict[str, Any]) -> None:
        log(20, "fedhur | round %d/3", 1)
        log(20, "for machines")
        (Path(run_config["output-dir"]) / "result.json").write_text(json.dumps(RESULT))

    monkeypatch.setattr(runtime, "run_local", run_local)
    handlers = list(FLOWER_LOGGER.handlers)
    shown = invoke("run", *OPTIONS, "--runtime", "local")
    assert shown.exit_code == 0
    assert "\nround 1/3\n" in shown.output
    assert "for machines" not in shown.output + "".join(capfd.readouterr())
    assert handlers == FLOWER_LOGGER.handlers


def test_a_failed_local_run_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedhur_app import runtime

    def run_local(run_config: dict[str, Any]) -> None:
        (Path(run_config["output-dir"]) / "result.json").write_text(json.dumps(FAILED))
        raise RuntimeError(FAILED["reason"])

    monkeypatch.setattr(runtime, "run_local", run_local)
    shown = invoke("run", *OPTIONS, "--runtime", "local")
    assert shown.exit_code == 1
    assert "the run failed: only 2 of 10 clients answered" in shown.output


@pytest.mark.parametrize("name", ["result.json", "history.jsonl"])
def test_an_output_that_holds_a_run_is_refused(flower: FakeFlower, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    shown = invoke("run", *OPTIONS, "--output", "out")
    assert shown.exit_code == 2
    assert f"already holds a run ({name})" in shown.output
    assert "--resume" in shown.output
    assert flower.arguments == {}


def test_an_output_that_is_a_file_is_refused(flower: FakeFlower, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    shown = invoke("run", *OPTIONS, "--output", "out")
    assert (shown.exit_code, flower.arguments) == (2, {})


def test_resume_takes_the_settings_of_the_run(flower: FakeFlower, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "old", train={"lr": 0.25})
    shown = invoke("run", "--resume", "old", "--rounds", "40", "--seed", "3", "--set", "train.lr=0.25")
    assert shown.exit_code == 0, shown.output
    assert flower.arguments["run_config"] == {
        "dataset": "synthetic",
        "strategy": "fedavg",
        "seed": 3,
        "overrides": "rounds=40",
        "output-dir": str(folder),
        "resume": str(folder),
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--strategy", "fedhur"], "strategy=fedhur contradicts"),
        (["--dataset", "ml-100k"], "dataset.name=ml-100k contradicts"),
        (["--seed", "4"], "seed=4 contradicts"),
        (["--set", "train.lr=0.2"], "train.lr=0.2 contradicts the run"),
        (["--set", "train.lrr=0.2"], "no setting 'train.lrr'"),
        (["--rounds", "20"], "rounds (30) can only be raised"),
        (["--output", "new"], "--output contradicts --resume"),
    ],
)
def test_options_that_contradict_the_resumed_run_are_refused(
    flower: FakeFlower, tmp_path: Path, options: list[str], text: str
) -> None:
    earlier_run(tmp_path / "old")
    shown = invoke("run", "--resume", "old", *options)
    assert shown.exit_code == 2
    assert text in shown.output
    assert flower.arguments == {}


def test_a_completed_run_that_was_continued_and_interrupted_goes_on(flower: FakeFlower, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "old")  # of 30 rounds at most
    (folder / "result.json").write_text(json.dumps(RESULT | {"rounds": 12, "max_rounds": 12}))
    shown = invoke("run", "--resume", "old")
    assert shown.exit_code == 0, shown.output


def test_what_cannot_be_resumed_is_refused(flower: FakeFlower, tmp_path: Path) -> None:
    shown = invoke("run", "--resume", "nowhere")
    assert shown.exit_code == 2
    assert "not the output folder of a run" in shown.output
    folder = earlier_run(tmp_path / "old")
    (folder / "result.json").write_text(json.dumps(RESULT))
    for rounds in ([], ["--rounds", "40"]):
        shown = invoke("run", "--resume", "old", *rounds)
        assert shown.exit_code == 2
        assert "stopped early after round 12 (patience 5)" in shown.output
    (folder / "result.json").write_text(json.dumps(RESULT | {"rounds": 30}))
    shown = invoke("run", "--resume", "old")
    assert shown.exit_code == 2
    assert "is completed; give --rounds above 30" in shown.output
    (folder / "checkpoint").rmdir()
    shown = invoke("run", "--resume", "old")
    assert shown.exit_code == 2
    assert "holds no checkpoint" in shown.output
    assert flower.arguments == {}


def test_the_result_of_before_a_resume_is_not_taken_for_the_new_one(flower: FakeFlower, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "old")
    (folder / "result.json").write_text(json.dumps(RESULT | {"rounds": 30}))
    flower.result = None
    shown = invoke("run", "--resume", "old", "--rounds", "40")
    assert shown.exit_code == 1
    assert "ended without writing a result" in shown.output


def test_data_describe_counts_the_synthetic_data() -> None:
    shown = invoke("data", "describe", "synthetic", "--set", "dataset.synthetic.users=50")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^users +50$", shown.output, re.MULTILINE)
    assert re.search(r"^clients +10$", shown.output, re.MULTILINE)


def test_data_describe_as_json_and_as_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "data.svg"
    options = ["--set", "dataset.synthetic.users=50", "--set", "dataset.clients.kind=dirichlet", "--json", "--plot"]
    shown = invoke("data", "describe", "synthetic", *options, str(picture))
    assert shown.exit_code == 0, shown.output
    described = json.loads(shown.stdout)
    assert (described["users"], len(described["client_sizes"])) == (50, 10)
    assert sum(client["users"] for client in described["client_sizes"]) == 50
    assert f"picture: {picture}" in shown.stderr
    assert "client sizes" in picture.read_text()


def test_data_describe_draws_known_forms_only() -> None:
    shown = invoke("data", "describe", "synthetic", "--plot", "data.gif")
    assert shown.exit_code == 2
    assert "--plot data.gif: pictures are .png, .svg or .pdf" in shown.output


def test_data_describe_counts_the_users_of_markets() -> None:
    shown = invoke("data", "describe", "markets-synthetic", "--set", "dataset.markets.users=[30,12]")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^clients +2$", shown.output, re.MULTILINE)
    assert re.search(r"^market +users +interactions\n0 +30 +\d+\n1 +12 +\d+$", shown.output, re.MULTILINE)


def test_data_fetch_of_an_unknown_name_is_one_line() -> None:
    shown = invoke("data", "fetch", "ml-10k")
    assert shown.exit_code == 2
    assert "ml-10k" in shown.output
    assert shown.output.startswith("error: ")


def test_the_follower_hands_over_whole_lines_and_the_last_ones(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    seen: list[list[int]] = []
    with HistoryFollower(path, lambda rounds: seen.append([entry["round"] for entry in rounds])):
        time.sleep(2 * cli.POLL_SECONDS)
        assert seen == []
        path.write_text(history_line(1, 0.1) + history_line(2, 0.2)[:9])
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen == [[1]]
        path.write_text(history_line(1, 0.1) + history_line(2, 0.2))
    assert seen[-1] == [1, 2]


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, highlight=False)


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_bar_shows_rounds_and_the_first_best() -> None:
    console = terminal()
    with LiveView(console, 30, "ndcg@10", False, io.StringIO()) as view:
        scores = [0.1, 0.3125, 0.3125, 0.2]
        view.show_rounds([json.loads(history_line(i + 1, score)) for i, score in enumerate(scores)])
        view.line("INFO : fedhur | round 5/30 | train.items | [10/10] clients")
    text = shown_on(console)
    assert " 4/30" in text
    assert "best validation ndcg@10 0.3125 (round 2)" in text
    assert "round 5/30 | train.items | [10/10] clients" in text


def test_a_history_that_gets_shorter_moves_the_bar_back() -> None:
    console = terminal()
    with LiveView(console, 30, "ndcg@10", False, io.StringIO()) as view:
        lines = [json.loads(history_line(round_, 0.1 * round_)) for round_ in (1, 2, 3)]
        view.show_rounds(lines)
        view.show_rounds(lines[:2])
    assert " 2/30" in shown_on(console).rsplit("round", 2)[-2]


def test_without_a_terminal_there_is_no_bar() -> None:
    console = Console(file=io.StringIO(), width=80)
    log = io.StringIO()
    with LiveView(console, 3, "ndcg@10", False, log) as view:
        view.show_rounds([json.loads(history_line(1, 0.25))])
        view.line("INFO : fedhur | round 1/3 | done")
        view.line("noise")
    assert shown_on(console) == "round 1/3 | done\n"
    assert log.getvalue() == "INFO : fedhur | round 1/3 | done\nnoise\n"
    view.show_hidden()
    assert shown_on(console) == "round 1/3 | done\nnoise\n"


def test_the_table_of_a_result() -> None:
    console = Console(file=io.StringIO(), width=100)
    show_result(console, RESULT, Path("/runs/a"))
    text = shown_on(console)
    assert "fedavg on synthetic, seed 1" in text
    assert re.search(r"ndcg@10 +│ +0\.3000 +│ +0\.3142", text)
    assert re.search(r"recall@10 +│ +- +│ +0\.2500", text)
    assert "best round 9 of 12, 196 users tested" in text
    assert "sent by clients 3.0 MiB, to clients 2.0 KiB, 61.2 s" in text
    assert "peak memory: server 512 MiB\n" in text
    assert text.endswith("output: /runs/a\n")


def test_runs_that_start_in_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    folders = [cli._make_folder(tmp_path / "runs", "ml-100k-fedhur-seed1-20260101T000000Z") for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() for folder in folders)


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(cli.UsageError, match=r"cannot write to .*--output"):
        cli._make_folder(blocker, "run")
