"use strict";
// The page says everything without this. Here: sorting, tooltips of the plot, highlighting, the download.

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      sortRows(table.tBodies[0], column, falling);
    });
  });
}

function sortRows(body, column, falling) {
  const rows = [...body.rows].map((row) => {
    const cell = row.cells[column];
    const key = cell.dataset.sort ?? cell.textContent.trim();
    return { row, key, number: key === "" ? NaN : Number(key) };
  });
  const present = rows.filter((r) => r.key !== "");
  const numeric = present.every((r) => !Number.isNaN(r.number));
  const names = new Intl.Collator("en", { numeric: true });
  present.sort((a, b) => (numeric ? a.number - b.number : names.compare(a.key, b.key)));
  if (falling) present.reverse();
  // What was not measured is neither small nor large: it stays at the end.
  body.append(...present.map((r) => r.row), ...rows.filter((r) => r.key === "").map((r) => r.row));
}

const tooltip = document.createElement("div");
tooltip.className = "tooltip";
tooltip.setAttribute("aria-hidden", "true");
tooltip.hidden = true;
document.body.append(tooltip);

function highlight(model) {
  for (const element of document.querySelectorAll("[data-model]")) {
    element.classList.toggle("lit", model !== undefined && element.dataset.model === model);
  }
}

function show(point, text) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const at = point.querySelector(".mark").getBoundingClientRect();
  const box = tooltip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - box.width / 2), document.documentElement.clientWidth - box.width - 8);
  const above = at.top - box.height - 14;
  tooltip.style.left = `${left + window.scrollX}px`;
  tooltip.style.top = `${(above > 0 ? above : at.bottom + 14) + window.scrollY}px`;
  highlight(point.dataset.model);
}

function hide() {
  tooltip.hidden = true;
  highlight(undefined);
}

for (const point of document.querySelectorAll(".pareto .point")) {
  const title = point.querySelector("title");
  const text = title.textContent;
  title.remove(); // the browser would show its own beside ours; the label stays for those who listen
  for (const event of ["pointerenter", "focus"]) point.addEventListener(event, () => show(point, text));
  for (const event of ["pointerleave", "blur"]) point.addEventListener(event, hide);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
});

for (const row of document.querySelectorAll("tr[data-model]")) {
  row.addEventListener("pointerenter", () => highlight(row.dataset.model));
  row.addEventListener("pointerleave", () => highlight(undefined));
}

const download = document.getElementById("download");
download.hidden = false;
download.addEventListener("click", () => {
  const data = JSON.stringify(JSON.parse(document.getElementById("report").textContent), null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data + "\n"], { type: "application/json" }));
  link.download = "report.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
