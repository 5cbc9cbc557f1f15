// The page: draws its figures, shows and hides runs, switches light and dark, exports, and follows a run that trains.

const PRINTED = { one: { width: 680, height: 290 }, two: { width: 334, height: 220 }, three: { width: 220, height: 185 } }; // as in print.css
const page = { data: null, arms: [], hidden: new Set(), plots: [], grid: null, printing: false };

function remember(theme) {
  try {
    localStorage.setItem("kairostep-theme", theme);
  } catch { /* a browser that keeps nothing for files */ }
}

function themeName() {
  if (page.printing) return "light";
  return document.documentElement.dataset.theme;
}

const isShown = (group) => !page.hidden.has(group);
const armOf = (key) => (page.data.groups.find((group) => group.key === key) || { arm: key }).arm;
const view = (panels) => ({ isShown, armOf, arms: page.arms, span: doublings(panels) });

function element(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

// Drawing

function columnsOf(figure) {
  const count = figure.panels.length;
  return count === 1 && !figure.panels[0].heat ? "one" : count === 2 || count === 4 ? "two" : "three";
}

// `kept` holds plots of an earlier content by their keys, which are drawn over instead of anew
function makePanels(card, figure, kept) {
  const place = card.querySelector(".panels");
  place.classList.add(columnsOf(figure));
  const span = doublings(figure.panels);
  return figure.panels.map((panel, i) => {
    const key = `${figure.title}/${panel.title}/${i}`;
    const plot = kept.get(key) ?? element("div", { className: "plot" });
    kept.delete(key);
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${figure.title}: ${panel.title || panel.y.title}`);
    const settings = page.data.groups.find((group) => group.key === panel.heat?.group)?.settings ?? "";
    const caption = element("figcaption", { textContent: panel.title, title: settings, hidden: !panel.title });
    const frame = element("figure", { className: "panel" }, caption, plot);
    place.append(frame);
    return { key, card, figure, panel, plot, frame, span };
  });
}

function drawPlot({ figure, panel, plot, span }) {
  const theme = THEMES[themeName()];
  const traces = panelTraces(panel, theme, armOf, page.arms, span);
  traces.forEach((trace, i) => (trace.visible = panel.heat ? true : isShown(panel.curves[i].group)));
  const layout = panelLayout(panel, theme);
  if (page.printing) Object.assign(layout, PRINTED[columnsOf(figure)]);
  return Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: !page.printing });
}

function fillLegend(card, figure) {
  const place = card.querySelector(".legend");
  place.replaceChildren();
  const relative = figure.panels.some((panel) => panel.heat && panel.heat.relative);
  if (relative) {
    const span = doublings(figure.panels), scale = element("span", { className: "scale" });
    scale.style.background = `linear-gradient(90deg, ${relativeScale(THEMES[themeName()]).map(([, color]) => color).join(", ")})`;
    place.classList.add("scaled");
    place.append(`${timesUniform(-span)} or less`, scale, `${timesUniform(span)} uniform or more`);
    return;
  }
  const groups = new Map(figure.panels.flatMap((panel) => panel.curves).map((curve) => [armOf(curve.group), curve.group]));
  if (groups.size < 2) return;
  for (const [arm, group] of groups) {
    const swatch = element("i", { className: "swatch" });
    swatch.style.setProperty("--color", styleOf(arm, page.arms, THEMES[themeName()]).color);
    const button = element("button", { type: "button", onclick: () => toggle([group]) }, swatch, arm);
    button.dataset.groups = group;
    place.append(button);
  }
}

async function draw() {
  const root = document.documentElement;
  delete root.dataset.drawn;
  colorSwatches();
  for (const plot of page.plots) {
    await drawPlot(plot);
    await new Promise((done) => setTimeout(done));
  }
  root.dataset.drawn = "true";
}

function colorSwatches() {
  const theme = THEMES[themeName()];
  for (const place of document.querySelectorAll("[data-arm]"))
    place.style.setProperty("--color", styleOf(place.dataset.arm, page.arms, theme).color);
  document.querySelectorAll(".card.figure").forEach((card, i) => fillLegend(card, page.data.figures[i]));
  showPressed();
}

// Which runs are shown

function toggle(groups) {
  const hide = groups.some(isShown);
  for (const group of groups) hide ? page.hidden.add(group) : page.hidden.delete(group);
  showRuns();
}

function showPressed() {
  for (const button of document.querySelectorAll("[data-groups]"))
    button.setAttribute("aria-pressed", String(button.dataset.groups.split(" ").some(isShown)));
}

function showRuns() {
  showPressed();
  for (const { panel, plot, frame } of page.plots) {
    if (panel.heat) frame.hidden = !isShown(panel.heat.group);
    else if (plot.data && panel.curves.length) Plotly.restyle(plot, { visible: panel.curves.map((curve) => isShown(curve.group)) });
  }
  for (const card of document.querySelectorAll(".card.figure"))
    card.querySelector(".none").hidden = page.plots.some((plot) => plot.card === card && (plot.panel.heat ? isShown(plot.panel.heat.group) : plot.panel.curves.some((curve) => isShown(curve.group))));
  for (const place of document.querySelectorAll(".grids [data-group]")) place.hidden = !isShown(place.dataset.group);
  for (const row of document.querySelectorAll("tr[data-group]")) row.toggleAttribute("data-hidden", !isShown(row.dataset.group));
}

function showGrids() {
  const last = Number(document.querySelector("#grid")?.max ?? 0), wanted = page.grid ?? last;
  for (const figure of document.querySelectorAll(".grids figure")) {
    const grids = [...figure.querySelectorAll("[data-grid]")];
    const chosen = Math.max(0, grids.length - 1 - (last - wanted));
    grids.forEach((grid, i) => (grid.hidden = i !== chosen));
    figure.querySelector(".step").textContent = `step ${Number(grids[chosen].dataset.step).toLocaleString("en")}`;
  }
}

// Light, dark, printed

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  document.querySelector("#theme").textContent = name === "dark" ? "Light" : "Dark";
}

function print(on) {
  if (page.printing === on) return;
  page.printing = on;
  colorSwatches();
  page.plots.forEach(drawPlot);
}

// Starting, and again when the content was replaced

function listen() {
  const on = (selector, event, act) => document.querySelectorAll(selector).forEach((place) => place.addEventListener(event, () => act(place)));
  on("nav [data-groups]", "click", (button) => toggle(button.dataset.groups.split(" ")));
  on("#everything", "click", () => { page.hidden.clear(); showRuns(); });
  on("#theme", "click", () => { chooseTheme(themeName() === "dark" ? "light" : "dark"); remember(themeName()); draw(); });
  on("#grid", "input", (slider) => { page.grid = Number(slider.value); showGrids(); });
  on("img[data-file]", "click", (image) => element("a", { href: image.src, download: image.dataset.file }).click());
  on("[data-table]", "click", (button) => save(`${button.dataset.table}.csv`, new Blob([toCsv(tableRows(document.querySelector(`#${button.dataset.table}-table`)))], { type: "text/csv" })));
  on("[data-csv]", "click", ({ dataset }) => exportCsv(page.data.figures[dataset.csv]));
  on("[data-png]", "click", async ({ dataset }) => {
    const figure = page.data.figures[dataset.png];
    save(`${fileName(figure.title)}.png`, await figureImage(figure, view(figure.panels)));
  });
}

function exportCsv(figure) {
  save(`${fileName(figure.title)}.csv`, new Blob([toCsv(figureRows(figure, isShown))], { type: "text/csv" }));
}

async function start() {
  page.data = JSON.parse(document.querySelector("#data").textContent);
  page.arms = [...new Set(page.data.groups.map((group) => group.arm))];
  const kept = new Map(page.plots.map(({ key, plot }) => [key, plot]));
  page.plots = page.data.figures.flatMap((figure, i) => makePanels(document.querySelector(`#figure-${i}`), figure, kept));
  kept.forEach((plot) => Plotly.purge(plot));
  chooseTheme(document.documentElement.dataset.theme);
  listen();
  showGrids();
  await draw();
  showRuns();
}

async function follow() {
  const began = performance.now();
  const live = () => document.querySelector("#live");
  const tell = (text, lost) => { live().hidden = false; live().textContent = text; live().classList.toggle("lost", lost); };
  try {
    const { version } = await (await fetch("version", { cache: "no-store" })).json();
    if (version !== document.body.dataset.version) {
      const open = [...document.querySelectorAll("details[open]")].map((place) => place.id);
      const made = await (await fetch("content", { cache: "no-store" })).json();
      document.querySelector("#content").innerHTML = made.content;
      document.body.dataset.version = made.version;
      open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
      const slider = document.querySelector("#grid");
      if (slider && page.grid !== null) slider.value = page.grid;
      await start();
    }
    tell("live", false);
  } catch { tell("not connected", true); }
  setTimeout(follow, Math.max(2000, 4 * (performance.now() - began))); // a large page is not drawn all the time
}

addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", ({ matches }) => print(matches));
start().then(() => { if (document.body.dataset.version) follow(); });
