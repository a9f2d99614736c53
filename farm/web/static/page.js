// Client-side functions of the page: search and folds in a transcript, keys, charts, confirmations, replay.
"use strict";

function all(selector, within = document) {
  return Array.from(within.querySelectorAll(selector));
}

function searchTranscript() {
  const box = document.getElementById("search");
  if (!box) return;
  const count = document.getElementById("search-count");
  let hits = [];
  let at = -1;
  function show(step) {
    if (!hits.length) return;
    at = (at + step + hits.length) % hits.length;
    hits[at].scrollIntoView({ block: "center" });
    count.textContent = `${at + 1} of ${hits.length}`;
  }
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase();
    all(".hit").forEach((each) => each.classList.remove("hit"));
    hits = wanted ? all(".turn").filter((each) => each.textContent.toLowerCase().includes(wanted)) : [];
    hits.forEach((each) => {
      each.classList.add("hit");
      all("details", each).forEach((fold) => { if (fold.textContent.toLowerCase().includes(wanted)) fold.open = true; });
    });
    at = -1;
    count.textContent = wanted ? `${hits.length} turns` : "";
    show(1);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); show(event.shiftKey ? -1 : 1); }
  });
}

function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (event.key === "/") {
      const box = document.getElementById("search") || document.getElementById("find");
      if (box) { event.preventDefault(); box.focus(); }
    } else if (event.key === "j" || event.key === "k") {
      const turns = all(".turn, tbody tr");
      const now = turns.findIndex((each) => each === document.activeElement);
      const next = turns[Math.max(0, Math.min(turns.length - 1, now + (event.key === "j" ? 1 : -1)))];
      if (next) { next.tabIndex = -1; next.focus(); next.scrollIntoView({ block: "nearest" }); }
    } else if (event.key === "Enter" && document.activeElement.matches("tbody tr")) {
      const link = document.activeElement.querySelector("a");
      if (link) link.click();
    } else if (event.key === "o") {
      const folds = all("details.fold");
      const open = folds.some((each) => !each.open);
      folds.forEach((each) => { each.open = open; });
    }
  });
}

function confirmOrders() {
  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
}

function colourOf(index) {
  return `hsl(${(index * 67 + 205) % 360} 60% 50%)`;
}

function draw(element, names, series, isTime) {
  if (!series.length || !series[0].length) { element.textContent = "no data yet"; return; }
  element.textContent = "";
  const quiet = getComputedStyle(document.body).getPropertyValue("color");
  const axis = { stroke: quiet, grid: { stroke: "#8884" } };
  new uPlot({
    width: Math.max(280, element.clientWidth),
    height: 240,
    scales: { x: { time: isTime } },
    axes: [axis, axis],
    series: [{}, ...names.map((name, index) => ({ label: name, stroke: colourOf(index), width: 2, spanGaps: true }))],
  }, series, element);
}

function charts() {
  all("[data-chart]").forEach((place) => {
    const values = JSON.parse(document.getElementById(place.dataset.chart).textContent);
    draw(place, values.names, values.series, true);
  });
  all("[data-history]").forEach((place) => {
    async function look() {
      const answer = await fetch(place.dataset.history, { headers: { accept: "application/json" } });
      if (!answer.ok) return;
      const values = await answer.json();
      draw(place, values.names, values.series, true);
    }
    look();
    setInterval(look, 15000);
  });
}

function replay() {
  const button = document.getElementById("replay");
  if (!button) return;
  const turns = all(".turn[data-at]");
  const speed = document.getElementById("replay-speed");
  let timer = null;
  function stop() {
    clearTimeout(timer);
    timer = null;
    turns.forEach((each) => { each.hidden = false; });
    button.textContent = "Replay";
  }
  function step(index) {
    if (index >= turns.length) { stop(); return; }
    turns[index].hidden = false;
    turns[index].scrollIntoView({ block: "end" });
    const wait = index + 1 < turns.length ? Number(turns[index + 1].dataset.at) - Number(turns[index].dataset.at) : 0;
    timer = setTimeout(step, Math.min(5000, Math.max(50, (wait * 1000) / Number(speed.value))), index + 1);
  }
  button.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    turns.forEach((each) => { each.hidden = true; });
    button.textContent = "Stop";
    step(0);
  });
}

searchTranscript();
keys();
confirmOrders();
charts();
replay();
