"use strict";
// Text is added to the page only through textContent, so no text is ever markup.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value, digits) {
  return value === null || value === undefined ? "?" : value.toFixed(digits);
}

// ---- the age of the page, and its reloading while the run goes on

let minutes = 0;
for (const time of document.querySelectorAll("time")) {
  minutes = Math.max(0, Math.round((Date.now() - new Date(time.dateTime)) / 60000));
  const age = minutes < 100 ? `${minutes} min` : minutes < 4320 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
  time.textContent = `${age} ago`;
  time.title = time.dateTime;
}
const RELOAD = 15; // seconds; the page does not reload once the reader has opened or selected something
const STALE = 120; // minutes without a new page
if ("running" in root.dataset && minutes < STALE) {
  setInterval(() => {
    const isRead = document.querySelector("details[open]") || document.activeElement !== document.body;
    if (!isRead) location.reload();
  }, RELOAD * 1000);
} else if ("running" in root.dataset) {
  document.getElementById("live").textContent = "Nothing new since: the run may have been killed.";
}
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", () => {
    document.querySelector(link.hash).open = true; // the link's target may be folded
  });
}

// ---- curves

function nearest(values, x) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (Math.abs(values[i] - x) < Math.abs(values[best] - x)) best = i;
  return best;
}

for (const figure of document.querySelectorAll(".chart")) {
  const chart = data.charts[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor");
  const outputs = figure.querySelectorAll("output");
  const span = data.plot.width - data.plot.left - data.plot.right;
  let at = null; // in steps

  const show = (x) => {
    at = Math.min(Math.max(x, 0), chart.most);
    const place = data.plot.left + (at / chart.most) * span;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    chart.series.forEach((series, i) => {
      const index = nearest(series.x, at);
      outputs[i].textContent = `${series.y[index]} (step ${+series.x[index].toFixed(1)})`;
    });
  };
  const hide = () => {
    at = null;
    cursor.setAttribute("visibility", "hidden");
    for (const output of outputs) output.textContent = "";
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * data.plot.width;
    show(((x - data.plot.left) / span) * chart.most);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const xs = chart.series[0].x;
    const index = at === null ? (direction > 0 ? -1 : xs.length) : nearest(xs, at);
    show(xs[Math.min(Math.max(index + direction, 0), xs.length - 1)]);
  });
}

// ---- completions

const form = document.getElementById("choose");
const groups = data.completions.groups;
const MOST_SHOWN = 60;

function card(group, row, withPrompt) {
  const made = element("article", "row");
  if (withPrompt) {
    made.append(element("small", "", `step ${group.step}`));
    made.append(element("bdi", "text soft", group.prompt));
  }
  const figures = element("div", "figures");
  figures.append(element("b", "", row.left_out ? "left out of the update" : `advantage ${number(row.advantage, 2)}`));
  figures.append(element("b", "", `reward ${number(row.reward, 3)}`));
  for (const [name, value] of Object.entries(row.rewards)) figures.append(element("span", "", `${name} ${number(value, 3)}`));
  (row.scores || []).forEach((score, i) => {
    figures.append(element("span", "", `${data.completions.criteria[i]} ${score === null ? "unreadable" : score}/5`));
  });
  figures.append(element("span", row.finish === "length" ? "wrong" : "", row.finish === "length" ? "truncated" : `ended: ${row.finish}`));
  const text = element("bdi", "text");
  text.tabIndex = 0;
  text.textContent = row.text;
  made.append(text, figures);
  return made;
}

function showCompletions() {
  const shown = document.getElementById("shown");
  const asked = form.elements;
  const words = asked.text.value.toLowerCase();
  const low = asked.low.value === "" ? -Infinity : +asked.low.value;
  const high = asked.high.value === "" ? Infinity : +asked.high.value;
  const isBounded = asked.low.value !== "" || asked.high.value !== "";
  const { truncated, unreadable } = asked;
  shown.replaceChildren();
  const grid = element("div", "group");
  if (words || isBounded || asked.category.value || truncated.checked || unreadable.checked) {
    let found = 0;
    for (const group of groups) {
      if (asked.category.value && group.category !== asked.category.value) continue;
      const promptHas = group.prompt.toLowerCase().includes(words);
      for (const row of group.rows) {
        if (isBounded && (row.reward === null || row.reward < low || row.reward > high)) continue;
        if (truncated.checked && row.finish !== "length") continue;
        if (unreadable.checked && !row.unreadable) continue;
        if (!promptHas && !row.text.toLowerCase().includes(words)) continue;
        if (++found <= MOST_SHOWN) grid.append(card(group, row, true));
      }
    }
    shown.append(element("p", "", `${found} found` + (found > MOST_SHOWN ? `; the first ${MOST_SHOWN} are shown` : "")), grid);
    return;
  }
  const group = groups[+asked.group.value];
  const heading = element("p");
  heading.append(element("bdi", "text", group.prompt));
  if (group.answer) heading.append(element("small", "", "  answer "), element("bdi", "text", group.answer));
  if (group.category) heading.append(element("small", "", "  category "), element("bdi", "text", group.category));
  for (const row of group.rows) grid.append(card(group, row, false));
  shown.append(heading, grid);
}

function fillGroups() {
  const step = +form.elements.step.value;
  form.elements.group.replaceChildren();
  groups.forEach((group, i) => {
    if (group.step === step) form.elements.group.append(new Option(group.prompt.slice(0, 80), i));
  });
}

function choose(index) {
  form.elements.step.value = groups[index].step;
  fillGroups();
  form.elements.group.value = index;
  showCompletions();
}

if (form) {
  for (const step of new Set(groups.map((group) => group.step))) form.elements.step.append(new Option(step, step));
  for (const category of new Set(groups.map((group) => group.category))) {
    if (category) form.elements.category.append(new Option(category.slice(0, 80), category));
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.name === "step") fillGroups();
    showCompletions();
  });
  form.addEventListener("reset", () => setTimeout(() => choose(0)));
  for (const button of form.querySelectorAll("button[data-move]")) {
    button.addEventListener("click", () => {
      const index = +form.elements.group.value + +button.dataset.move;
      choose(Math.min(Math.max(index, 0), groups.length - 1));
    });
  }
  choose(groups.length - 1);
}

// ---- held-out answers

const filter = document.getElementById("filter");
if (filter) {
  const problems = [...document.querySelectorAll("#held-out .problem")];
  const texts = problems.map((problem) => problem.textContent.toLowerCase());
  filter.addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("input", () => {
    const words = filter.elements.text.value.toLowerCase();
    const kind = filter.elements.kind.value;
    let found = 0;
    problems.forEach((problem, i) => {
      problem.hidden = !(texts[i].includes(words) && (!kind || problem.dataset.kind === kind));
      found += !problem.hidden;
    });
    document.getElementById("found").textContent = `${found} of ${problems.length}`;
  });
}
