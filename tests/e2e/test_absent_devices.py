"""Devices and servers that go away in the middle of a run: processes that are really killed, stopped, started again.

Each waits for Flower's heartbeats and time limits: run by hand with `pytest -m slow tests/e2e`. docs/deployment.md has
the results.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.devices import NAMES, ROUNDS, Devices, Run, planted, start_all, wait_until
from tests.running import history, result

LOST = "bert"
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def devices(tmp_path_factory) -> Iterator[Devices]:
    made = planted(tmp_path_factory.mktemp("deployment"))
    try:
        start_all(made)
        yield made
    finally:
        made.stop()


@pytest.fixture
def output(devices, request) -> Path:
    return devices.server / "runs" / request.node.name


def begun_round(devices: Devices, round_: int, since: int) -> None:
    """Wait until the device that will be lost works on a round; `since` is the length of its log at the run's start."""
    wait_until(lambda: f"ROUND round-{round_}]" in devices.log(LOST)[since:], f"round {round_} begins at the device")


def clients_of_rounds(output: Path) -> list[int]:
    return [line["stages"]["train.items"]["replies"] for line in history(output)]


def test_a_device_without_power_is_given_up_after_its_heartbeat_and_joins_again_later(devices, output):
    since = len(devices.log(LOST))
    run = Run(devices, output)
    begun_round(devices, 2, since)
    start = time.monotonic()
    devices.power_off(LOST)
    run.wait_for(f"round 2/{ROUNDS} | train.items | 2/3 clients")
    waited = time.monotonic() - start
    devices.start(LOST)
    status, said = run.end()
    assert status == 0, said
    assert waited < 120
    assert clients_of_rounds(output)[:2] == [3, 2]
    print(f"given up after {waited:.0f} s")


def test_a_client_process_that_is_killed_costs_its_stage_only(devices, output):
    since = len(devices.log(LOST))
    run = Run(devices, output)
    begun_round(devices, 2, since)
    wait_until(lambda: bool(devices.working(LOST)), "the device works")
    start = time.monotonic()
    for pid in devices.working(LOST):
        os.kill(pid, signal.SIGKILL)
    run.wait_for(f"round 2/{ROUNDS} | train.items | 2/3 clients")
    print(f"given up after {time.monotonic() - start:.0f} s")
    status, said = run.end()
    assert status == 0, said
    assert clients_of_rounds(output)[:2] == [3, 2]
    assert clients_of_rounds(output)[-1] == 3


def test_a_device_that_hangs_is_given_up_after_the_stages_time_and_its_late_answer_refused(devices, output):
    limit = 120
    since = len(devices.log(LOST))
    run = Run(devices, output, f"--set=server.stage_timeout={limit}")
    begun_round(devices, 2, since)
    wait_until(lambda: bool(devices.working(LOST)), "the device works")
    stopped = devices.working(LOST)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for(f"round 2/{ROUNDS} | train.items | 2/3 clients")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    status, said = run.end()
    assert status == 0, said
    assert clients_of_rounds(output)[:2] == [3, 2]
    assert result(output)["status"] == "completed"


def test_too_few_devices_end_the_run_with_the_reason(devices, output):
    since = len(devices.log(LOST))
    run = Run(devices, output, "--set=server.quorum=1.0")
    begun_round(devices, 2, since)
    devices.kill(LOST, "flower-supernode")
    status, said = run.end()
    assert status == 1
    assert re.search(r"2 of 3 clients answered, 3 are needed", said)
    assert "continue with: fedhur" in said


def test_a_run_goes_on_after_the_superlink_was_killed(devices, output):
    run = Run(devices, output)
    run.wait_for(f"| round 1/{ROUNDS} | validation")
    devices.kill("server", "fedhur_app.deploy.superlink")
    status, said = run.end()
    assert status == 1, said
    # The supervisor starts it again; its database knows the devices, and they have not noticed much.
    devices.wait_for_server()
    resumed = Run(devices, output, "--resume", str(output), fresh=False)
    status, said = resumed.end()
    assert status == 0, said
    assert [line["round"] for line in history(output)] == list(range(1, ROUNDS + 1))
    assert clients_of_rounds(output)[-1] == len(NAMES)
