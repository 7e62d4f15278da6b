"use strict";

// --- tables: a click on a head sorts, numbers as numbers, empty cells always last ---
function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0];
  const column = head.cellIndex, before = head.getAttribute("aria-sort");
  const number = head.classList.contains("n");
  const up = before === "none" ? !number : before === "descending";
  const key = row => {
    const cell = row.cells[column];
    if (!number) return cell.textContent.trim();
    return cell.dataset.v === undefined ? NaN : Number(cell.dataset.v);
  };
  const compare = (a, b) => number ? a - b : a.localeCompare(b, undefined, { numeric: true });
  const missing = value => value === "" || Number.isNaN(value);
  const rows = Array.from(body.rows, row => ({ row, value: key(row) }));
  rows.sort((a, b) => {
    if (missing(a.value) || missing(b.value)) return missing(a.value) - missing(b.value);
    return up ? compare(a.value, b.value) : compare(b.value, a.value);
  });
  for (const other of head.parentNode.cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...rows.map(each => each.row));
}
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sortBy(button.closest("th")));

// --- filter: rows that hold all words ---
for (const box of document.querySelectorAll("input[data-filter]")) {
  const rows = Array.from(document.getElementById(box.dataset.filter).tBodies[0].rows);
  const texts = rows.map(row => row.textContent.toLowerCase());
  const told = document.getElementById(box.dataset.filter + "-count");
  const apply = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every(word => texts[i].includes(word));
      shown += !row.hidden;
    });
    told.textContent = `${shown} of ${rows.length} runs`;
  };
  box.addEventListener("input", apply);
  apply();
}

// --- line charts: show and hide lines, read values at a round ---
for (const figure of document.querySelectorAll("figure[data-lines]")) {
  const chart = figure.querySelector("svg.chart"), rule = chart.querySelector(".rule");
  const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const buttons = Array.from(figure.querySelectorAll(".legend button"));
  const show = (button, on) => {
    button.setAttribute("aria-pressed", String(on));
    chart.querySelector(`[data-series="${button.dataset.series}"]`).classList.toggle("off", !on);
  };
  for (const button of buttons)
    button.addEventListener("click", () => show(button, button.getAttribute("aria-pressed") !== "true"));
  for (const all of figure.querySelectorAll("button[data-all]"))
    all.addEventListener("click", () => buttons.forEach(button => show(button, all.dataset.all === "1")));
  const slider = figure.querySelector("input[type=range]");
  if (!slider) continue;
  const { low, high, left, right } = chart.dataset;
  const read = () => {
    const round = Number(slider.value);
    const x = Number(left) + (right - left) * (round - low) / (high - low);
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.classList.remove("off");
    figure.querySelector("output[data-round]").textContent = round;
    for (const button of buttons) {
      const line = data[button.dataset.series], at = line.x.indexOf(round);
      button.querySelector("output").textContent = at < 0 ? "" : line.y[at].toFixed(4);
    }
  };
  slider.addEventListener("input", read);
}

// --- on paper nothing is folded ---
let opened = [];
addEventListener("beforeprint", () => {
  opened = Array.from(document.querySelectorAll("details:not([open])"));
  opened.forEach(each => { each.open = true; });
});
addEventListener("afterprint", () => opened.forEach(each => { each.open = false; }));
