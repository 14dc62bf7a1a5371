"use strict";
// The charts. Each is a function of the data in the page, the controls and the theme, and is drawn again when one of them changes.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const chosen = (id) => (by(id) ? Number(by(id).value) : 0);
const hidden = new Set();
const PRINTED = { width: 680, height: 340 }; // px: fits on a printed page

function colour(name, alpha = 1) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return `rgba(${r},${g},${b},${alpha})`;
}

function layout(more) {
  const soft = colour("soft"), line = colour("line"), ink = colour("ink");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, tickfont: { color: soft } };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
    margin: { l: 56, r: 16, t: 30, b: 48 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: soft, font: { color: ink } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
  };
  return { ...base, ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
}

// --- curves: a line for each method, with a band over its seeds

function curves(read, title, unit, guides = []) {
  const axis = Object.keys(data.axes)[chosen("axis")];
  const known = data.methods.map((method, at) => ({ ...method, at })).filter((m) => read(m) && !hidden.has(m.at));
  const lines = known.map((m) => curve(m, read(m), m.x[axis], unit));
  const last = Math.max(0, ...known.map((m) => m.x[axis].at(-1)));
  return {
    traces: [...known.map((m) => ribbon(m, read(m), m.x[axis])).filter((one) => one.x.length), ...lines],
    layout: layout({
      hovermode: known.length > 8 ? "closest" : "x unified",
      xaxis: { title: { text: data.axes[axis] }, range: [0, last * 1.02 || 1] },
      yaxis: { title: { text: title } },
      shapes: guides.map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("soft"), width: 1.5, dash: "dot" } })),
      annotations: guides.map((y) => ({ xref: "paper", x: 1, y, text: `target ${y}${unit}`, showarrow: false, xanchor: "right", yanchor: "bottom", bgcolor: colour("card", 0.7), font: { size: 12, color: colour("soft") } })),
    }),
  };
}

function onTest() {
  const at = chosen("metric-of"), name = Object.keys(data.metrics)[at], metric = data.metrics[name];
  return curves((method) => method.metrics[name], metric.heading, metric.unit, at ? [] : data.targets); // targets are of the first metric
}

function gain() {
  const [metric] = Object.values(data.metrics);
  return curves((method) => method.gain, metric.difference.trim() || metric.title, metric.difference);
}

function theory() {
  const name = Object.keys(data.theory)[chosen("theory-of")];
  return curves((method) => method[name], "nats", "");
}

function curve(method, band, x, unit) {
  const dash = ["solid", "dash", "dot", "dashdot"][Math.floor(method.at / 10) % 4];
  return {
    type: "scatter", mode: x.length > 1 ? "lines" : "markers", connectgaps: true, name: text(method.label), x, y: band.mean, customdata: band.std,
    line: { color: colour(`c${method.at % 10}`), width: 2.5, dash }, marker: { color: colour(`c${method.at % 10}`), size: 9 },
    hovertemplate: `%{y:.3~f}${unit} ± %{customdata:.2~f}<extra>${text(method.label)}</extra>`,
  };
}

function ribbon(method, band, x) {
  const at = method.seeds > 1 ? band.mean.map((_, n) => n).filter((n) => band.mean[n] !== null) : [];
  const edge = (sign) => at.map((n) => band.mean[n] + sign * band.std[n]);
  return {
    type: "scatter", mode: "lines", hoverinfo: "skip", fill: "toself", fillcolor: colour(`c${method.at % 10}`, 0.16), line: { width: 0 },
    x: [...at, ...at.slice().reverse()].map((n) => x[n]), y: [...edge(1), ...edge(-1).reverse()],
  };
}

// --- tables of colours

function heat(z, x, y, titles, hover, more = {}) {
  const scale = [[0, colour("paper")], [0.05, mix(0.12)], [0.5, mix(0.55)], [1, colour("heat")]];
  return {
    traces: [{ type: "heatmap", z, x: x.map(text), y: y.map(text), colorscale: scale, hoverongaps: false, hovertemplate: hover + "<extra></extra>", xgap: 1, ygap: 1,
      colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: colour("soft") } }, ...more }],
    layout: layout({ xaxis: { title: { text: titles[0] }, type: "category", showgrid: false }, yaxis: { title: { text: titles[1] }, type: "category", autorange: "reversed", showgrid: false } }),
  };
}

function mix(share) {
  const [a, b] = ["paper", "heat"].map((name) => colour(name).match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map((n) => Math.round(a[n] + share * (b[n] - a[n])))})`;
}

function byClient() {
  const run = data.clients[chosen("clients-run")];
  const quantity = by("clients-of").value || Object.keys(run.tables)[0];
  const z = run.tables[quantity];
  return heat(z, run.rounds, z.map((_, n) => n), ["round", "client"], `client %{y}, round %{x}: %{z}`);
}

function partition() {
  const one = data.partitions[chosen("partition-of")];
  by("partition-figures").replaceChildren(...Object.entries(one.figures).map(([name, value]) => tile(value, name)));
  const title = one.clients > one.counts.length ? `client (the first ${one.counts.length} of ${one.clients})` : "client";
  return heat(one.counts, one.classes, one.counts.map((_, n) => n), ["class", title], "client %{y}: %{z} of class %{x}", numbers(one.counts, one.counts));
}

function confusion() {
  const one = data.confusions[chosen("confusion-of")];
  const share = one.counts.map((row) => row.map((count) => (100 * count) / (row.reduce((a, b) => a + b, 0) || 1)));
  const rounded = share.map((row) => row.map((part) => (part >= 0.05 ? part.toFixed(part < 10 ? 1 : 0) : "")));
  return heat(share, one.classes, one.classes, ["predicted class", "class"], "%{z:.1f} % of %{y} predicted as %{x}: %{customdata} examples", { ...numbers(rounded, one.counts), customdata: one.counts, zmin: 0, zmax: 100 });
}

function numbers(shown, cells) {
  return cells.length * cells[0].length <= 400 ? { text: shown.map((row) => row.map((cell) => cell || "")), texttemplate: "%{text}" } : {};
}

function tile(figure, what) {
  const box = document.createElement("div");
  for (const [kind, content] of [["dd", figure], ["dt", what]]) box.appendChild(document.createElement(kind)).textContent = content;
  return box;
}

// Plotly reads some HTML in labels, and labels are texts of the user.
const text = (label) => String(label).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// --- drawing

const charts = {
  metric: onTest, gain, theory, clients: byClient, partition, confusion,
};
const moved = ["metric", "gain", "theory"].filter(by); // they depend on the methods and the axis
const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
const waiting = Object.keys(charts).filter(by);

function draw(id, size = {}) {
  const { traces, layout } = charts[id]();
  Plotly.react(by(id), traces, { ...layout, ...size }, config);
}

function drawNext() { // one at a time: the first is visible at once, and the page stays responsive
  if (waiting.length === drawn().length) requestAnimationFrame(() => performance.mark("first"));
  if (waiting.length) { draw(waiting.shift()); setTimeout(drawNext); } else { performance.mark("all"); document.documentElement.dataset.drawn = "all"; }
}

const redraw = (ids, size) => ids.filter((id) => !waiting.includes(id)).forEach((id) => draw(id, size));
const drawn = () => Object.keys(charts).filter(by);

// --- controls

by("methods").addEventListener("change", (event) => {
  hidden[event.target.checked ? "delete" : "add"](Number(event.target.value));
  redraw(moved);
});
for (const [id, on] of [["all", true], ["none", false]]) {
  by(id)?.addEventListener("click", () => {
    for (const box of by("methods").querySelectorAll("input")) { box.checked = on; hidden[on ? "delete" : "add"](Number(box.value)); }
    redraw(moved);
  });
}
const dependent = { axis: moved, "metric-of": ["metric"], "theory-of": ["theory"], "clients-of": ["clients"], "partition-of": ["partition"], "confusion-of": ["confusion"] };
for (const [id, ids] of Object.entries(dependent)) by(id)?.addEventListener("change", () => redraw(ids));
by("clients-run")?.addEventListener("change", () => { offer(); redraw(["clients"]); });

function offer() { // the quantities of the chosen run
  const names = Object.keys(data.clients[chosen("clients-run")].tables);
  const kept = by("clients-of").value;
  by("clients-of").replaceChildren(...names.map((name) => new Option(name, name, false, name === kept)));
}
if (by("clients-of")) offer();
for (const id of ["partition", "confusion"]) by(id)?.classList.add("square");

// Choices are kept when the page is loaded again, which `feddkd watch` does while runs play.
const STORE = "feddkd report";
function remember() {
  const selects = Object.fromEntries([...document.querySelectorAll("select")].map((one) => [one.id, one.value]));
  const aside = [...hidden].map((at) => data.methods[at].label);
  sessionStorage.setItem(STORE, JSON.stringify({ selects, aside, theme: document.documentElement.dataset.theme }));
}
function recall() {
  const kept = JSON.parse(sessionStorage.getItem(STORE));
  if (!kept) return;
  if (kept.theme) document.documentElement.dataset.theme = kept.theme;
  data.methods.forEach((method, at) => { if (kept.aside.includes(method.label)) hidden.add(at); });
  for (const box of by("methods").querySelectorAll("input")) box.checked = !hidden.has(Number(box.value));
  for (const [id, value] of Object.entries(kept.selects)) {
    if (id === "clients-of") offer();
    if ([...(by(id)?.options ?? [])].some((option) => option.value === value)) by(id).value = value;
  }
}
if (location.protocol.startsWith("http")) { // from `feddkd watch`
  recall();
  addEventListener("change", remember);
  addEventListener("click", remember);
}

const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : system.matches);
function themed() {
  by("theme").textContent = dark() ? "Light" : "Dark";
  by("theme").setAttribute("aria-pressed", String(dark()));
  redraw(drawn());
}
by("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; themed(); });
system.addEventListener("change", themed);

let before;
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  waiting.length = 0;
  redraw(drawn(), PRINTED);
});
addEventListener("afterprint", () => {
  if (before) document.documentElement.dataset.theme = before; else delete document.documentElement.dataset.theme;
  themed();
});
themed();
drawNext();
