"""Settings on a report page: those that all share once, the others as a table of arm by setting."""

from collections import Counter

from fedhur_app.reporting.page import Arm, Page, Results
from fedhur_app.reporting.page_runs import PageRun, value_text
from fedhur_app.reporting.page_tables import Cell, Head, as_number, few, safe, table

OPEN_SETTINGS = 12  # a wider table of settings is folded


def shared_settings(page: Page) -> str:
    """Settings of all runs: what they share, and what differs anywhere."""
    shared, different = page.shared_settings(), page.different_settings()
    without = [run for run in page.runs if not run.settings]
    parts = [
        f"<p>{len(shared)} settings are the same in all runs, {len(different)} are not. The sections above show those "
        "that differ between their arms.</p>",
        f"<details><summary>The {len(shared)} settings that all runs share</summary>{_setting_list(shared)}</details>",
    ]
    if different:
        arms = [(results, arm) for results in page.results for arm in results.arms]
        parts.append(
            f"<details><summary>The {len(different)} settings that differ, of all {len(arms)} arms</summary>"
            f"{_setting_table(arms, different, page, with_data=True)}</details>"
        )
    if without:
        parts.append(f'<p class="quiet">Unknown are the settings of {safe(few([run.name for run in without]))}.</p>')
    return "".join(parts)


def different_settings(results: Results, page: Page) -> str:
    """Settings that differ between the arms of one section, and those that these share but not all of the page."""
    known = [run for run in results.runs if run.settings]
    if not known:
        return ""
    part = Page("", page.made, known, [], [], [])
    different, everywhere = part.different_settings(), page.shared_settings()
    here = {name: value for name, value in part.shared_settings().items() if name not in everywhere}
    parts = []
    if different:
        table = _setting_table([(results, arm) for arm in results.arms], different, page, with_data=False)
        title = f"Settings that differ between these arms ({len(different)})"
        opened = " open" if len(different) <= OPEN_SETTINGS else ""
        parts.append(f"<details{opened}><summary>{title}</summary>{table}</details>")
    if here:
        title = f"Settings that all arms here share, but not all runs of the page ({len(here)})"
        parts.append(f"<details><summary>{title}</summary>{_setting_list(here)}</details>")
    return "".join(parts)


def _setting_list(settings: dict[str, object]) -> str:
    rows = [
        [Cell(f"<code>{safe(name)}</code>"), Cell(f"<code>{safe(value_text(value))}</code>")]
        for name, value in sorted(settings.items())
    ]
    return table("", [Head("setting", False), Head("value", False)], rows, tall=True)


def _setting_table(arms: list[tuple[Results, Arm]], names: list[str], page: Page, with_data: bool) -> str:
    """Arm by setting; what most arms have is grey."""
    texts = [
        [" / ".join(dict.fromkeys(_setting(run, name) for run in arm.runs if run.settings)) or "?" for name in names]
        for _, arm in arms
    ]
    usual = [Counter(column).most_common(1)[0] for column in zip(*texts, strict=True)]
    rows = []
    for (results, arm), values in zip(arms, texts, strict=True):
        cells = [Cell(safe(arm.name))]
        if with_data:
            cells.append(Cell(safe(" ".join(filter(None, (page.source(results), results.name))))))
        cells.append(Cell(safe(", ".join(str(run.seed) for run in arm.runs))))
        cells += [
            Cell(f"<code>{safe(value)}</code>", as_number(value), "common" if value == most and count > 1 else "best")
            for value, (most, count) in zip(values, usual, strict=True)
        ]
        rows.append(cells)
    columns = list(zip(*texts, strict=True))
    numbers = [all(as_number(value) is not None for value in column) for column in columns]
    head = [Head("arm", False), *([Head("data", False)] if with_data else []), Head("seeds", False)]
    head += [Head(name, number) for name, number in zip(names, numbers, strict=True)]
    return table("", head, rows, tall=len(rows) > 15)


def _setting(run: PageRun, name: str) -> str:
    return value_text(run.settings[name]) if name in run.settings else "no such setting"
