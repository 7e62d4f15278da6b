import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app import flower_runner
from fedhur_app.flower_runner import GIB, FlowerError, client_resources, free_port, run_flower, toml_text

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tinyapp"
version = "1.0.0"
description = "d"
license = "Apache-2.0"
dependencies = ["flwr[simulation]"]
[tool.uv]
exclude-dependencies = ["flwr"]
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "tinyapp.server:app"
clientapp = "tinyapp.client:app"
[tool.flwr.app.config]
text = ""
number = 0
output-dir = ""
mode = "good"
"""

CLIENT = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.query("hello")
def hello(message, context):
    print("a line of a client", flush=True)
    record = {"partition": int(context.node_config["partition-id"]), "file": __file__,
              "pid": os.getpid(), "parent": os.getppid()}
    return Message(RecordDict({"me": ConfigRecord(record)}), reply_to=message)
"""

SERVER = """
import json, os, time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    config = dict(context.run_config)
    if config["mode"] == "raise":
        raise ValueError("no luck [today]")
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.1)
    messages = [Message(RecordDict({}), node, "query.hello") for node in grid.get_node_ids()]
    clients = [dict(reply.content["me"]) for reply in grid.send_and_receive(messages)]
    seen = {"config": config, "clients": clients, "pid": os.getpid()}
    (Path(config["output-dir"]) / "seen.json").write_text(json.dumps(seen))
    print("\\x1b[92mgreetings\\x1b[0m", flush=True)
    while config["mode"] == "wait":
        time.sleep(0.1)
"""


@pytest.fixture
def tiny_app(tmp_path: Path) -> Path:
    folder = tmp_path / "tinyapp"
    package = folder / "tinyapp"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(CLIENT)
    (package / "server.py").write_text(SERVER)
    return folder


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that runs made."""
    made: list[Path] = []
    original = flower_runner._temporary_folder

    def noted() -> Path:
        made.append(original())
        return made[-1]

    monkeypatch.setattr(flower_runner, "_temporary_folder", noted)
    return made


def processes_of(seen: dict) -> set[int]:
    pids = {client[key] for client in seen["clients"] for key in ("pid", "parent")}
    return pids | {seen["pid"]}


def alive(pids: set[int]) -> set[int]:
    return pids & set(flower_runner._process_table())


@pytest.mark.e2e
def test_a_run_completes_with_the_given_config_and_leaves_nothing(tiny_app: Path, homes: list[Path]) -> None:
    config = {
        "text": "train.lr=0.5 'a b'=[1, \"x\"] \\ # ü",
        "number": 7,
        "output-dir": str(tiny_app.parent),
        "mode": "good",
    }
    before = (tiny_app / "pyproject.toml").read_bytes()
    lines: list[str] = []
    outcome = run_flower(config, 3, on_line=lines.append, app_folder=tiny_app)

    assert outcome.completed, (outcome, lines)
    assert outcome.status == "finished:completed"
    assert outcome.details == ""
    seen = json.loads((tiny_app.parent / "seen.json").read_text())
    assert seen["config"] == config
    assert sorted(client["partition"] for client in seen["clients"]) == [0, 1, 2]
    # The clients ran this checkout, whatever the folder of the test's process.
    assert {Path(client["file"]).parent for client in seen["clients"]} == {tiny_app / "tinyapp"}
    assert "greetings" in lines
    assert not any("a line of a client" in line for line in lines)  # init-args-log-to-driver=false
    assert (tiny_app / "pyproject.toml").read_bytes() == before
    assert alive(processes_of(seen)) == set()
    assert not homes[0].exists()


@pytest.mark.e2e
def test_a_server_that_raises_is_a_failure_with_its_reason(tiny_app: Path, homes: list[Path]) -> None:
    lines: list[str] = []
    config = {"output-dir": str(tiny_app.parent), "mode": "raise"}
    outcome = run_flower(config, 1, on_line=lines.append, app_folder=tiny_app)
    assert not outcome.completed
    assert outcome.status == "finished:failed"
    assert "no luck [today]" in outcome.details
    assert not homes[0].exists()


@pytest.mark.e2e
def test_ctrl_c_stops_the_run_and_leaves_nothing(tiny_app: Path, homes: list[Path]) -> None:
    def interrupt(line: str) -> None:
        if "greetings" in line:
            raise KeyboardInterrupt

    config = {"output-dir": str(tiny_app.parent), "mode": "wait"}
    with pytest.raises(KeyboardInterrupt):
        run_flower(config, 3, on_line=interrupt, app_folder=tiny_app)
    seen = json.loads((tiny_app.parent / "seen.json").read_text())
    assert alive(processes_of(seen)) == set()
    assert not homes[0].exists()


def test_a_superlink_that_ends_at_its_start_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, homes: list[Path]
) -> None:
    for name in ("flwr", "flower-superlink"):
        (tmp_path / name).write_text("#!/bin/sh\necho cannot listen; exit 3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FlowerError, match="ended at its start: cannot listen"):
        run_flower({}, 1, on_line=print, app_folder=tmp_path)
    assert not homes[0].exists()


def test_an_environment_without_flower_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FlowerError, match="flwr does not exist: install Flower"):
        run_flower({}, 1, on_line=print, app_folder=tmp_path)


def test_the_app_is_this_checkout_or_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (flower_runner.app_folder() / "fedhur_app" / "flower_runner.py").is_file()
    monkeypatch.setattr(flower_runner, "__file__", str(tmp_path / "fedhur_app" / "flower_runner.py"))
    with pytest.raises(FlowerError, match="--runtime local"):
        flower_runner.app_folder()


def test_the_environment_is_the_run_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    environment = flower_runner.environment(tmp_path, Path("/venv/bin"))
    assert "RAY_ADDRESS" not in environment
    assert environment["FLWR_HOME"] == environment["RAY_TMPDIR"] == str(tmp_path)
    assert environment["PATH"].split(os.pathsep)[0] == "/venv/bin"


def test_a_long_temporary_path_gives_way_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / ("x" * 60)))
    folder = flower_runner._temporary_folder()
    shutil.rmtree(folder)
    # Ray appends up to 70 characters and a Unix socket's path may have 103 (macOS).
    assert len(str(folder)) <= 33


@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True), st.text() | st.integers(-9, 9)))
def test_any_value_survives_toml(values: dict[str, str | int]) -> None:
    assert tomllib.loads(toml_text(values)) == values


def test_a_free_port_can_be_listened_on() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()


@pytest.mark.parametrize(
    ("device", "free", "clients", "cores", "share"),
    [
        ("cpu", [80 * GIB], 100, 8, 0.0),  # not asked for
        ("auto", [], 100, 8, 0.0),  # none there
        ("auto", [80 * GIB], 100, 8, 0.125),  # memory for 53, but only 8 cores
        ("cuda", [5 * GIB], 100, 8, 0.3333),  # memory for 3, rounded down so that 3 shares fit
        ("auto", [80 * GIB], 2, 8, 0.5),  # fewer clients than cores
        ("auto", [80 * GIB, 4 * GIB], 100, 8, 0.5),  # the fuller GPU decides: 2 on each
        ("auto", [GIB], 100, 8, 0.0),  # too full for one client
    ],
)
def test_share_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, free: list[int], clients: int, cores: int, share: float
) -> None:
    monkeypatch.setattr(flower_runner, "free_gpu_memory", lambda: free)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert client_resources(device, clients) == (1, share)


@pytest.mark.parametrize(("free", "text"), [([], "finds no CUDA device"), ([GIB], "1.0 GiB free")])
def test_cuda_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch, free: list[int], text: str) -> None:
    monkeypatch.setattr(flower_runner, "free_gpu_memory", lambda: free)
    with pytest.raises(FlowerError, match=text):
        client_resources("cuda", 10)


# A shell that leaves an orphan behind: the grandchild's parent is gone, its session is not.
ORPHAN = "(sleep 300 & echo $!) ; sleep 300"


def orphaning_session(first: str = "") -> tuple["subprocess.Popen[str]", int]:
    process = subprocess.Popen(["sh", "-c", first + ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_session_is_ended_with_orphans_and_the_deaf_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_runner, "PATIENCE", 0.5)
    process, orphan = orphaning_session("trap '' TERM; ")
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        flower_runner.end_sessions({process.pid})
        assert alive({process.pid, orphan}) == set()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        process.communicate()


def test_the_guard_ends_the_sessions_of_a_killed_process(tmp_path: Path) -> None:
    process, orphan = orphaning_session()
    home = tmp_path / "home"
    home.mkdir()
    # Stands for the command: tells its guard about a session, and is killed.
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "guard = subprocess.Popen([sys.executable, *sys.argv[1:3]], stdin=subprocess.PIPE, text=True)\n"
            "guard.stdin.write(sys.argv[3] + '\\n'); guard.stdin.flush(); print('told', flush=True)\n"
            "time.sleep(300)",
            flower_runner.__file__,
            str(home),
            str(process.pid),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "told\n"
    assert alive({process.pid, orphan}) == {process.pid, orphan}
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 20
    while (alive({process.pid, orphan}) or home.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive({process.pid, orphan}) == set()
    assert not home.exists()
    process.communicate()
