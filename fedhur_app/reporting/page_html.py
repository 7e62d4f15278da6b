"""A report page as one HTML file that needs nothing else: style, script and pictures are inside.

Every text that comes from a file is escaped, and a Content-Security-Policy forbids the page to load anything or to run
any script but its own.
"""

import base64
import hashlib
import math
from collections import Counter
from pathlib import Path

from fedhur_app import __version__
from fedhur_app.evaluation.statistics import summarise
from fedhur_app.reporting.comparison import MIB
from fedhur_app.reporting.markdown import to_html
from fedhur_app.reporting.page import Page, Results
from fedhur_app.reporting.page_documents import Document, Picture, Sheet
from fedhur_app.reporting.page_results import results_html
from fedhur_app.reporting.page_runs import PageRun
from fedhur_app.reporting.page_settings import shared_settings
from fedhur_app.reporting.page_tables import (
    Cell,
    Head,
    as_number,
    count_cell,
    few,
    number_cell,
    safe,
    spread_cell,
    table,
)

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def to_page(page: Page, command: str = "fedhur report") -> str:
    """The whole HTML file.

    Args:
        page: What is on it.
        command: How it was made.
    """
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    sections = [("overview", "Overview", _overview(page))]
    documents = [
        (f"document-{number}", document.title, _document(document, page, f"document-{number}"))
        for number, document in enumerate(page.documents, 1)
    ]
    told = sum(document.kind in ("study", "markets") for document in page.documents)
    sections += documents[:told]
    for number, results in enumerate(page.results_of(None), 1):
        name = f"data-{number}"
        sections.append((name, results.name, results_html(results, page, name, 3)))
    sections += documents[told:]  # their runs are shown already
    if page.runs:
        sections += [("settings", "Settings", shared_settings(page)), ("runs", "All runs", _runs(page.runs))]
    links = "".join(f'<li><a href="#{name}">{safe(title)}</a></li>' for name, title, _ in sections)
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{safe(title)}</h2>\n{inside}</section>'
        for name, title, inside in sections
    )
    made = page.made.strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="FedHUR {__version__}">
<link rel="icon" href="data:,">
<title>{safe(page.title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">To the results</a>
<header>
<h1>{safe(page.title)}</h1>
<p class="quiet">FedHUR report of <time datetime="{page.made.isoformat()}">{made}</time></p>
<nav aria-label="Contents"><ul>{links}</ul></nav>
</header>
<main id="main">
{_problems(page)}
{body}
</main>
<footer class="quiet"><p>Made by FedHUR {__version__} with <code>{safe(command)}</code>. The page holds all that it
shows and loads nothing.</p></footer>
<script>{script}</script>
</body>
</html>
"""


def _hash(inside: str) -> str:
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"


# --- overview ---------------------------------------------------------------------------------------------------------


def _problems(page: Page) -> str:
    if not page.problems:
        return ""
    items = "".join(f"<li><code>{safe(each.where)}</code>: {safe(each.what)}</li>" for each in page.problems)
    return (
        '<aside class="problems" aria-labelledby="problems-h">'
        f'<h2 id="problems-h">Not everything could be read</h2><ul>{items}</ul></aside>'
    )


def _overview(page: Page) -> str:
    runs = page.runs
    unfinished = sum(run.status != "completed" for run in runs)
    codes = Counter(run.code for run in runs if run.code)
    seeds = sorted({run.seed for run in runs if run.seed >= 0})
    data, strategies = ({getattr(run, name) for run in runs} - {""} for name in ("dataset", "strategy"))
    studies = sum(document.kind == "study" for document in page.documents)
    facts = [
        ("runs", len(runs), f"{unfinished} did not complete" if unfinished else "all completed"),
        ("data sets", len(data), few(sorted(data))),
        ("strategies", len(strategies), few(sorted(strategies))),
        ("seeds", len(seeds), few(list(map(str, seeds)))),
        ("code versions", len(codes), few([f"{code} ({count})" for code, count in codes.most_common()])),
    ]
    if studies:
        facts.insert(0, ("studies", studies, ""))
    cards = "".join(
        f"<div><dt>{name}</dt><dd>{count}<small>{safe(more)}</small></dd></div>" for name, count, more in facts
    )
    parts = [f'<dl class="facts">{cards}</dl>'] if runs else ["<p>There are reports, but no runs.</p>"]
    rows = [row for results in page.results for row in _best_row(results, page)]
    if rows:
        head = [Head("data", False), Head("study", False), Head("arms"), Head("runs"), Head("best arm", False)]
        head += [Head("test"), Head("lowest"), Head("highest"), Head("metric", False), Head("next best", False)]
        head.append(Head("its test"))
        if not studies:
            del head[1]
            rows = [row[:1] + row[2:] for row in rows]
        parts.append(table("Best on each data set: highest mean over seeds, ± standard deviation", head, rows))
        parts.append(
            '<p class="quiet">Lowest and highest are over the seeds of the best arm. Which arm is best is seen on the '
            "test rows here; the sections show validation as well.</p>"
        )
    machines = sorted({run.machine for run in runs if run.machine})
    if machines:
        parts.append(f'<p class="quiet">Machines: {safe("; ".join(machines))}.</p>')
    return "".join(parts)


def _best_row(results: Results, page: Page) -> list[list[Cell]]:
    column = f"test_{results.metric}"
    judged = [(arm, summarise(arm.values(column))) for arm in results.arms if arm.values(column)]
    if not judged:
        return []
    judged.sort(key=lambda pair: -pair[1].mean)
    best, summary = judged[0]
    values = best.values(column)
    runner = judged[1] if len(judged) > 1 else None
    return [
        [
            Cell(safe(results.name)),
            Cell(safe(page.source(results))),
            count_cell(len(results.arms)),
            count_cell(len(results.runs)),
            Cell(safe(best.name)),
            spread_cell(summary, 4),
            number_cell(min(values), 4),
            number_cell(max(values), 4),
            Cell(safe(results.metric)),
            Cell(safe(runner[0].name) if runner else "-"),
            spread_cell(runner[1], 4) if runner else Cell("-"),
        ]
    ]


# --- runs -------------------------------------------------------------------------------------------------------------


def _runs(runs: list[PageRun]) -> str:
    bases = ("ndcg", "recall", "mrr", "auc")
    columns = list(dict.fromkeys(column for run in runs for column in run.values if column.startswith("test_")))
    columns = [column for column in columns if column.removeprefix("test_").partition("@")[0] in bases] or columns[:4]
    rows = []
    for run in runs:
        good = "completed" if run.status == "completed" else "failed"
        status = f'<span class="{good}">{safe(run.status)}</span>'
        cells = [Cell(f"<code>{safe(run.name)}</code>"), Cell(safe(run.dataset)), Cell(safe(run.strategy))]
        cells += [count_cell(run.seed) if run.seed >= 0 else Cell("-"), Cell(status)]
        cells += [number_cell(run.values.get(column, math.nan), 4) for column in columns]
        cells += [number_cell(run.values.get(f"validation_{run.metric}", math.nan), 4)]
        cells += [
            number_cell(run.values.get(name, math.nan) / unit, digits)
            for name, unit, digits in (
                *(("best_round", 1, 0), ("rounds", 1, 0)),
                *(("bytes_up", MIB, 2), ("bytes_down", MIB, 2), ("seconds", 1, 1)),
            )
        ]
        cells += [Cell(f"<code>{safe(run.code)}</code>"), Cell(safe(run.reason), classes="wide")]
        rows.append(cells)
    head = [Head("run", False), Head("data", False), Head("strategy", False), Head("seed"), Head("status", False)]
    head += [Head(column.removeprefix("test_")) for column in columns]
    head += [Head("validation"), Head("best round"), Head("rounds"), Head("MiB up"), Head("MiB down"), Head("seconds")]
    head += [Head("code", False), Head("why not completed", False)]
    box = (
        '<div class="filter"><label for="filter">Filter</label>'
        '<input id="filter" type="search" data-filter="all-runs" placeholder="fedhur seed-2" autocomplete="off" '
        f'spellcheck="false"><output class="quiet" id="all-runs-count">{len(runs)} runs</output></div>'
    )
    return box + table("", head, rows, tall=True, name="all-runs")


# --- documents --------------------------------------------------------------------------------------------------------


def _document(document: Document, page: Page, name: str) -> str:
    parts = []
    if document.question:
        parts.append(f'<p class="question">{safe(document.question)}</p>')
    facts = [*document.facts, ("folder", document.name)]
    lines = "".join(f"<dt>{safe(fact)}</dt><dd>{safe(value)}</dd>" for fact, value in facts)
    parts.append(f'<dl class="lines">{lines}</dl>')
    pictures = {picture.file: picture for picture in document.pictures}

    def image(source: str, _: str) -> str | None:
        picture = pictures.pop(source, None)  # not shown again below
        return None if picture is None else _picture(picture)

    if document.text:
        text = to_html(document.text, image)
        folded = document.kind in ("comparison", "tuning")
        parts.append(f"<details><summary>Text of the report</summary>{text}</details>" if folded else text)
    parts += [_picture(picture) for picture in pictures.values()]
    for number, results in enumerate(page.results_of(document.folder), 1):
        if any(run.values for run in results.runs) or any(run.status != "completed" for run in results.runs):
            parts.append(f"<h3>Runs on {safe(results.name)}</h3>")
            parts.append(results_html(results, page, f"{name}-{number}", 4))
    if document.arms:
        rows = [[Cell(safe(cell)) for cell in arm] for arm in document.arms]
        head = [Head(text, False) for text in ("arm", "data", "strategy", "settings")]
        parts.append(f"<details><summary>The arms</summary>{table('', head, rows)}</details>")
    parts += [_sheet(sheet) for sheet in document.sheets]
    return "".join(parts)


def _picture(picture: Picture) -> str:
    kind = _TYPES[Path(picture.file).suffix.lower()]
    data = base64.b64encode(picture.content).decode()
    return (
        f'<figure><div class="picture" tabindex="0" role="region" aria-label="{safe(picture.title)}">'
        f'<img alt="{safe(picture.says or picture.title)}" src="data:{kind};base64,{data}"></div>'
        f"<figcaption><strong>{safe(picture.title)}</strong>{safe(picture.says)}</figcaption></figure>"
    )


def _sheet(sheet: Sheet) -> str:
    columns = list(zip(*sheet.rows, strict=True)) or [()] * len(sheet.head)
    numbers = [any(column) and all(as_number(c) is not None or c == "" for c in column) for column in columns]
    rows = [
        [_sheet_cell(cell) if number else Cell(safe(cell)) for cell, number in zip(row, numbers, strict=True)]
        for row in sheet.rows
    ]
    head = [Head(text, number) for text, number in zip(sheet.head, numbers, strict=True)]
    more = f", {sheet.left_out} further rows are in the file" if sheet.left_out else ""
    summary = f"{safe(sheet.title)} ({len(sheet.rows)} rows{more})"
    return f"<details><summary>{summary}</summary>{table('', head, rows, tall=True)}</details>"


def _sheet_cell(text: str) -> Cell:
    value = as_number(text)
    if value is None:
        return Cell("")
    short = text if len(text) <= 7 else f"{value:.5g}"
    return Cell(short, value)
