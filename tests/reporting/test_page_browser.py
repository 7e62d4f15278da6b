"""A report page in headless Chromium: layout, sorting, filter, lines, no errors, screenshots."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from fedhur_app.reporting.page import collect
from fedhur_app.reporting.page_html import to_page
from tests.reporting.folders import federated_run, study

NAMES = ("chromium", "chromium-browser", "google-chrome")

# What a person would do, and what can be seen then.
CHECK = """
"use strict";
const out = {};
const box = el => el.getBoundingClientRect();
out.inner = innerWidth;
out.width = document.documentElement.scrollWidth;
out.wide = Array.from(document.querySelectorAll("body *"))
  .filter(el => !el.closest(".scroll, .picture, svg, .skip") && box(el).right > innerWidth + 1)
  .map(el => el.outerHTML.slice(0, 80));
const table = Array.from(document.querySelectorAll("table"))
  .find(each => each.caption && each.caption.textContent.startsWith("Test:"));
const heads = Array.from(table.tHead.rows[0].cells);
const ndcg = heads.find(h => h.textContent.includes("ndcg"));
const first = () => Array.from(table.tBodies[0].rows, row => row.cells[0].textContent);
out.roles = heads.every(h => h.scope === "col" && h.getAttribute("aria-sort") === "none");
out.before = first();
const button = ndcg.querySelector("button");
button.focus();
out.focused = document.activeElement === button;
button.click();
out.down = [ndcg.getAttribute("aria-sort"), first()];
button.click();
out.up = [ndcg.getAttribute("aria-sort"), first()];
heads[0].querySelector("button").click();
out.byName = [ndcg.getAttribute("aria-sort"), heads[0].getAttribute("aria-sort"), first()];
const filter = document.getElementById("filter");
filter.value = "seed-2 FEDAVG";
filter.dispatchEvent(new Event("input"));
const runs = document.getElementById("all-runs");
const shown = Array.from(runs.tBodies[0].rows).filter(row => box(row).height > 0);
out.filtered = [shown.length, document.getElementById("all-runs-count").textContent];
const figure = document.querySelector("figure[data-lines]");
const line = figure.querySelector(".legend button");
const group = figure.querySelector(`svg [data-series="${line.dataset.series}"]`);
const seen = () => [line.getAttribute("aria-pressed"), getComputedStyle(group).display !== "none"];
out.line = [seen()];
line.click();
out.line.push(seen());
figure.querySelector("[data-all='0']").click();
out.none = figure.querySelectorAll("svg .series:not(.off)").length;
figure.querySelector("[data-all='1']").click();
out.line.push(seen());
const slider = figure.querySelector("input[type=range]");
slider.value = "2";
slider.dispatchEvent(new Event("input"));
out.read = line.textContent;
out.small = Array.from(document.querySelectorAll("svg.chart text"))
  .map(t => box(t).height).filter(height => height > 0).reduce((a, b) => Math.min(a, b), 99);
const chart = figure.querySelector("svg.chart");
out.cut = Array.from(document.querySelectorAll("svg.chart text")).filter(t => {
  const own = box(t), whole = box(t.closest("svg"));
  return own.left < whole.left - 1 || own.right > whole.right + 1 || own.bottom > whole.bottom + 1;
}).map(t => t.textContent);
out.pictures = Array.from(document.images, image => image.complete && image.naturalWidth > 0);
out.alerts = document.querySelectorAll("b, main script:not([type])").length;
parent.postMessage(JSON.stringify(out), "*");
"""

# A window is never narrower than 500 pixels, a frame can be. --dump-dom prints what the frame told.
FRAME = """<!DOCTYPE html><pre id="outcome"></pre>
<script>addEventListener("message", event => { document.getElementById("outcome").textContent = event.data; });</script>
<iframe src="PAGE" width="WIDTH" height="800" style="border: 0"></iframe>
"""


def browser() -> str:
    found = os.environ.get("FEDHUR_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing = f"none of {', '.join(NAMES)} is in PATH, and FEDHUR_CHROMIUM does not name a browser"
        if os.environ.get("FEDHUR_BROWSER_TESTS"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def open_page(page: Path, width: int, height: int, *options: str) -> subprocess.CompletedProcess[str]:
    profile = page.parent / f"profile-{page.stem}-{width}"
    return subprocess.run(
        [
            *(browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"),
            *(f"--user-data-dir={profile}", f"--window-size={width},{height}", *options, page.as_uri()),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    study(root / "relations")
    for strategy, values in (("fedavg", (0.9, 0.1)), ("fedhur", (0.95, 0.97)), ("fedcia", (0.05, 0.2))):
        for seed, value in enumerate(values, 1):
            curve = [value / 4, value / 2, value / 3]
            federated_run(root / "cmp" / strategy / f"seed-{seed}", strategy, seed, curve, value, "train.lr=0.01")
    (root / "broken").mkdir()
    (root / "broken" / "result.json").write_text("{")
    file = root / "page.html"
    file.write_text(to_page(collect([root / "cmp", root / "broken", root / "relations"])), encoding="utf-8")
    return file


def outcome(page: Path, width: int) -> dict[str, Any]:
    """Open a copy that has the check as a second script of its own."""
    digest = base64.b64encode(hashlib.sha256(CHECK.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    copy = page.with_name(f"checked-{width}.html")
    copy.write_text(text.replace("</body>", f"<script>{CHECK}</script></body>"), encoding="utf-8")
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(FRAME.replace("PAGE", copy.name).replace("WIDTH", str(width)), encoding="utf-8")
    done = open_page(frame, 1400, 900, "--virtual-time-budget=3000", "--dump-dom")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    found = re.search(r'<pre id="outcome">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_sorts_filters_and_has_no_errors(page: Path, width: int) -> None:
    found = outcome(page, width)
    assert found["inner"] == width
    assert found["width"] <= width
    assert found["wide"] == []
    assert found["roles"]
    assert found["focused"]
    # The first test table is the study's: utility .315, none .215.
    assert found["before"] == ["utility", "none"]
    assert found["down"] == ["descending", ["utility", "none"]]
    assert found["up"] == ["ascending", ["none", "utility"]]
    assert found["byName"] == ["none", "ascending", ["none", "utility"]]
    assert found["filtered"] == [1, "1 of 15 runs"]
    assert found["line"] == [["true", True], ["false", False], ["true", True]]
    assert found["none"] == 0
    assert found["read"] == "utility0.2000"
    assert found["small"] >= 10
    assert found["cut"] == []
    assert found["pictures"] == [True, True]
    assert found["alerts"] == 0


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
def test_screenshots_have_the_asked_size_and_show_something(page: Path, width: int, height: int) -> None:
    shot = page.with_name(f"shot-{width}.png")
    done = open_page(page, width, height, f"--screenshot={shot}")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    image = imread(shot)
    assert image.shape[:2] == (height, width)
    grey = image[..., :3].mean(axis=-1)
    # Text and edges: neither one colour nor noise.
    assert grey.std() > 0.04
    assert 0.02 < (np.abs(grey - np.median(grey)) > 0.15).mean() < 0.5
