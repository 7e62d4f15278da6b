"""A real federation on the loopback: TLS, device keys, processes that are killed.

One run serves all tests of this file: three devices train, one of them is killed in round 2 and comes back. What waits
for heartbeats is in test_absent_devices.py and run by hand.
"""

import http.client
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from client_app.state import ClientState
from fedhur_app.cli import app
from fedhur_app.data.shards import load_shard
from fedhur_app.deploy import layout
from fedhur_app.protocol import Content, encode
from fedhur_app.runtime import run_local
from tests.e2e.devices import MARK, NAMES, ROUNDS, Devices, Run, planted, rows_of, settings_list, start_all, wait_until
from tests.running import history, result

LOST = "bert"  # is killed in round 2
pytestmark = pytest.mark.e2e


@dataclass
class Trained:
    devices: Devices
    output: Path
    status: int
    said: str
    seconds: float


@pytest.fixture(scope="module")
def devices(tmp_path_factory) -> Iterator[Devices]:
    folder = tmp_path_factory.mktemp("deployment")
    made = planted(folder, "seed-secret = 0\n")
    # These are started later, to be refused.
    layout.add(made.folder, ["stranger"])
    made.finish("stranger")
    (made.server / "keys" / "stranger.pub").unlink()
    made.another("elsewhere", "anna")
    layout.init(folder / "other", ["x"])
    shutil.copyfile(folder / "other" / "ca" / "ca.crt", made.place("elsewhere") / "ca.crt")
    try:
        start_all(made)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def trained(devices, tmp_path_factory) -> Trained:
    """The run: one device is killed while it trains in round 2, and comes back by itself."""
    output = devices.server / "runs" / "first"
    start = time.monotonic()
    run = Run(devices, output)
    run.wait_for(f"| round 1/{ROUNDS} | validation")
    wait_until(lambda: "ROUND round-2]" in devices.log(LOST), "round 2 begins at the device")
    devices.kill(LOST, "flower-supernode")
    copy = tmp_path_factory.mktemp("in the middle")
    for file in devices.server.glob("superlink.db*"):
        shutil.copy(file, copy)
    shutil.copytree(copy, devices.server / "copy")
    status, said = run.end()
    return Trained(devices, output, status, said, time.monotonic() - start)


def test_a_run_survives_the_death_of_a_device(trained):
    assert trained.status == 0, trained.said
    lines = history(trained.output)
    took_part = [line["stages"]["train.items"]["replies"] for line in lines]
    # On a busy machine it may take longer than the rest of round 2 until the device is back.
    assert took_part[:2] == [3, 2]
    assert took_part[-1] == 3
    assert "Node Unavailable" in lines[1]["stages"]["train.items"]["absent"][str(NAMES.index(LOST))]
    assert result(trained.output)["status"] == "completed"
    assert "killed by signal 9" in trained.devices.log(LOST)
    assert "the server was told" in trained.devices.log(LOST)


def test_the_numbers_are_those_of_the_simulation(trained, tmp_path):
    """With no secret in the draws, the devices and one process agree to the bit, the absence included."""
    dead = NAMES.index(LOST)
    missed = {f"round-{line['round']}" for line in history(trained.output) if line["stages"]["train.items"]["absent"]}

    def absent(message: Any, client: int) -> str | None:
        return "drop" if client == dead and message.metadata.group_id in missed else None

    overrides = " ".join([*settings_list(), "dataset.clients.number=3"])
    config = {"dataset": "planted", "strategy": "fedhur", "overrides": overrides, "output-dir": str(tmp_path / "run")}
    run_local(config, absent)
    own, simulated = history(trained.output), history(tmp_path / "run")
    for line, other in zip(own, simulated, strict=True):
        for key in ("loss", "validation", "examples", "groups", "global_filter"):
            assert line[key] == other[key], (line["round"], key)
    assert result(trained.output)["test"] == result(tmp_path / "run")["test"]


def needles(devices: Devices) -> dict[str, list[bytes]]:
    """What must be nowhere on the server: ids, titles, times, rows of user tables, lists of items."""
    found: dict[str, list[bytes]] = {
        "ids and titles": [f"{MARK}{kind}".encode() for kind in ("User", "Item", "Title")],
        "times": [b"1876543"],
        "user vectors": [],
        "items of users": [],
    }
    for name in NAMES:
        newest = max(devices.place(name).glob("state/**/round-*.npz"))
        users = ClientState.load(newest).arrays["model"]["users"].numpy()
        # Half a row: also a part of a table would be found.
        found["user vectors"] += [row[:4].astype("<f4").tobytes() for row in users if np.abs(row).max() > 0]
        (rows,) = devices.place(name).glob("state/rows-*/shard.npz")
        shard = load_shard(rows)
        for user in range(shard.n_users):
            items = shard.train.of(user)
            for kind in ("<i8", "<i4", "<i2"):
                found["items of users"].append(items[:5].astype(kind).tobytes())
            found["items of users"].append(json.dumps(items[:5].tolist())[1:-1].encode())
    return found


def hits(folder: Path, wanted: dict[str, list[bytes]]) -> list[str]:
    """Which kinds of needles are in which files below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            found += [
                f"{path.name}: {kind}" for kind, texts in wanted.items() if any(text in content for text in texts)
            ]
    return found


def test_the_server_holds_no_interaction_no_id_and_no_user_vector(trained, tmp_path):
    wanted = needles(trained.devices)
    assert all(wanted.values())
    seen = tmp_path / "server"
    shutil.copytree(trained.devices.server, seen)
    (seen / "items.csv").unlink()  # the catalogue, which `split` put there
    shutil.copy(trained.devices.log_file("server"), seen)
    assert (seen / "superlink.db").stat().st_size > 0
    assert (seen / "copy" / "superlink.db").stat().st_size > 0
    assert hits(seen, wanted) == []

    # What the search would find, had it been sent.
    newest = max(trained.devices.place("anna").glob("state/**/round-*.npz"))
    leak = encode(Content({}, {"table": ClientState.load(newest).arrays["model"]}))
    array = next(iter(leak.array_records["table"].values()))
    (tmp_path / "leak").mkdir()
    (tmp_path / "leak" / "superlink.db").write_bytes(b"something" + array.data)
    (tmp_path / "leak" / "log").write_text(f"user {MARK}User003 did something")
    assert hits(tmp_path / "leak", wanted) in (
        ["log: ids and titles", "superlink.db: user vectors"],
        ["log: ids and titles"],
    )


def test_every_device_recommends_to_its_own_users(trained):
    """Lists without what the user has, other ones for other users, from the device's files alone."""
    for name in NAMES:
        place = trained.devices.place(name)
        rows = rows_of(place)
        lists = []
        for user in sorted({row["user"] for row in rows})[:3]:
            options = ["--state-dir", str(place / "state"), "--data-path", str(place / "data"), "--json"]
            shown = CliRunner().invoke(app, ["recommend", *options, "--user", user])
            assert shown.exit_code == 0, shown.output
            answer = json.loads(shown.output)
            items = [suggestion["item"] for suggestion in answer["items"]]
            has = {row["item"] for row in rows if row["user"] == user}
            assert (answer["known"], answer["seen"], len(set(items))) == ("trained", len(has), 10)
            assert not has & set(items)
            for suggestion in answer["items"]:
                assert suggestion["title"] == suggestion["item"].replace("Item", "Title")
            lists.append(items)
        assert lists[0] != lists[1] != lists[2]


def test_those_who_do_not_belong_are_refused_and_told_why(devices):
    devices.start("stranger")
    devices.start("elsewhere")
    devices.wait_for(
        "stranger", "the server refuses stranger: either its key is not registered (on the server: `fedhur"
    )
    devices.wait_for("elsewhere", "was not signed by the authority")
    assert "copy ca/ca.crt here" in devices.log("elsewhere")
    assert "SuperNode ID" not in devices.log("stranger") + devices.log("elsewhere")
    devices.stop("stranger", "elsewhere")
    plain = http.client.HTTPConnection("127.0.0.1", devices.port, timeout=20)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.getresponse()


def test_other_code_on_a_device_is_refused_and_named(trained):
    devices = trained.devices
    for path in devices.place("carl").glob("flwr/apps/*/client_app/app.py"):
        path.write_text(path.read_text() + "# changed on the device\n")
    status, said = Run(devices, devices.server / "runs" / "changed").end()
    assert status == 1
    assert "run other code" in said
