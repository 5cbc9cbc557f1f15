"use strict";
// From panels, which are plain data, to plotly's traces and layouts; `theme` is one of THEMES.

const COLORS = {
  light: ["#2563eb", "#d97706", "#059669", "#c026a3", "#7c3aed", "#0e7490", "#b91c1c", "#4d7c0f", "#92400e", "#475569"],
  dark: ["#6ea8fe", "#fbb040", "#34d399", "#f07fd6", "#b49bff", "#3fd0e4", "#ff8a80", "#b5dd4c", "#e0a478", "#b4bfcd"],
};
const THEMES = {
  light: { ink: "#1c2430", muted: "#5d6878", grid: "#e6eaf0", card: "#ffffff", few: "#3b6fb6", middle: "#f3f4f6", more: "#d9622b", colors: COLORS.light },
  dark: { ink: "#e8ecf2", muted: "#9aa6b6", grid: "#2a323d", card: "#181e26", few: "#4f95ff", middle: "#242c36", more: "#ff8142", colors: COLORS.dark },
};
const DASHES = ["solid", "dash", "dot", "dashdot"];
const LARGEST = 3; // colours end at 1/8 and 8 times uniform

function styleOf(group, arms, theme) {
  const number = arms.indexOf(group);
  if (number < 0) return { color: theme.muted, dash: "dot" }; // of no run, such as a mean over runs
  const colors = theme.colors;
  return { color: colors[number % colors.length], dash: DASHES[Math.floor(number / colors.length) % DASHES.length] };
}

// Text for plotly, which reads some HTML in it
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function curveTrace(curve, panel, look) {
  const name = plain(curve.name);
  const trace = { x: curve.x, y: curve.y, name, meta: [name, plain(panel.x.title), plain(panel.y.title)] };
  const errors = curve.errors.length ? "  ± %{customdata:.3g}" : "";
  if (curve.errors.length) trace.customdata = curve.errors;
  trace.hovertemplate = `<b>%{meta[0]}</b><br>%{meta[1]}: %{x}<br>%{meta[2]}: %{y:.6~g}${errors}<extra></extra>`;
  trace.opacity = curve.faint ? 0.4 : 1;
  if (curve.style === "bars") return { ...trace, type: "bar", marker: { color: look.color } };
  const many = curve.y.length > 60;
  if (curve.style === "points") return { ...trace, type: "scatter", mode: "markers", marker: { color: look.color, size: many ? 3.5 : 7, opacity: many ? 0.6 : 1 } };
  const few = curve.y.length <= 40;
  return {
    ...trace, type: "scatter", mode: few ? "lines+markers" : "lines", marker: { color: look.color, size: 4.5 },
    line: { color: look.color, width: curve.faint ? 1.2 : 1.8, dash: look.dash }, connectgaps: false,
  };
}

function relativeScale(theme) {
  return [[0, theme.few], [0.5, theme.middle], [1, theme.more]];
}

// How many doublings the colours span, the same in all panels of a figure
function doublings(panels) {
  let most = 1;
  for (const { heat } of panels)
    if (heat && heat.relative) for (const row of heat.z) for (const mass of row) if (mass) most = Math.max(most, Math.abs(Math.log2(mass * heat.y.length)));
  return Math.min(LARGEST, Math.ceil(most));
}

function timesUniform(power) {
  const whole = 2 ** Math.abs(power);
  const text = Number.isInteger(whole) ? whole : whole.toFixed(1).replace(/\.0$/, "");
  return power < 0 ? `1/${text}×` : `${text}×`;
}

function heatTrace(heat, panel, theme, span, withScale) {
  const meta = [plain(heat.name), plain(panel.x.title), plain(panel.y.title), plain(heat.label)];
  const trace = { type: "heatmap", x: heat.x, y: heat.y, z: heat.z, meta, name: meta[0], showscale: withScale, zsmooth: false };
  const place = "<b>%{meta[0]}</b><br>%{meta[1]}: %{x}<br>%{meta[2]}: %{y:.3~g}<br>%{meta[3]}: ";
  if (!heat.relative) return { ...trace, colorscale: "Viridis", hovertemplate: `${place}%{z:.4~g}<extra></extra>` };
  const power = (mass) => (mass === null ? null : mass > 0 ? Math.log2(mass * heat.y.length) : -2 * LARGEST);
  const ticks = Array.from({ length: 2 * span + 1 }, (_, i) => i - span);
  return {
    ...trace, z: heat.z.map((row) => row.map(power)), customdata: heat.z, zmin: -span, zmax: span, colorscale: relativeScale(theme),
    colorbar: { tickvals: ticks, ticktext: ticks.map(timesUniform), thickness: 10, outlinewidth: 0 },
    hovertemplate: `${place}%{customdata:.4~g}<extra></extra>`,
  };
}

// 1, 2, 5, 10, ... within the values of a logarithmic axis; powers of ten alone where those are many
function logTicks(values) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return {};
  const low = Math.floor(Math.log10(extreme(positive, Math.min))), high = Math.ceil(Math.log10(extreme(positive, Math.max)));
  const every = Math.ceil((high - low) / 8);
  const factors = high - low <= 2 ? [1, 2, 3, 5, 7] : high - low <= 4 ? [1, 3] : [1];
  const ticks = [];
  for (let power = low; power <= high; power += every) for (const factor of factors) ticks.push(Number((factor * 10 ** power).toPrecision(1)));
  return { tickvals: ticks, ticktext: ticks.map((tick) => (tick >= 1e-3 && tick < 1e5 ? String(tick) : tick.toExponential().replace("e+", "e"))) };
}

function axisLayout(axis, theme, values, title) {
  const layout = {
    title: { text: plain(title), font: { size: 12, color: theme.muted }, standoff: 6 }, gridcolor: theme.grid, zeroline: false,
    tickfont: { size: 11, color: theme.muted }, type: axis.log ? "log" : undefined, automargin: true, linecolor: theme.grid, ticks: "",
  };
  if (axis.log) Object.assign(layout, logTicks(values));
  if (axis.start !== null && axis.end !== null) layout.range = axis.log ? [Math.log10(axis.start), Math.log10(axis.end)] : [axis.start, axis.end];
  else if (flatRange(values, axis)) layout.range = flatRange(values, axis);
  else if (axis.start !== null) Object.assign(layout, { rangemode: axis.start === 0 ? "tozero" : "normal" });
  return layout;
}

// Around a value that never changes, which plotly would put on an axis from -1 to 1
function flatRange(values, axis) {
  const known = values.filter((value) => typeof value === "number");
  if (axis.log || !known.length || !known[0] || known.some((value) => value !== known[0])) return null;
  return [Math.min(0, 1.6 * known[0]), Math.max(0, 1.6 * known[0])];
}

function extreme(values, pick) {
  return values.reduce((one, other) => pick(one, other));
}

function panelLayout(panel, theme) {
  const values = panel.curves.flatMap((curve) => curve.y);
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    margin: { l: 46, r: 12, t: 8, b: 40 }, dragmode: "zoom", barmode: "group",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", color: theme.ink, size: 12 },
    hoverlabel: { bgcolor: theme.card, bordercolor: theme.muted, font: { color: theme.ink, size: 12 }, align: "left", namelength: -1 },
    xaxis: axisLayout(panel.x, theme, panel.curves.flatMap((curve) => curve.x), panel.x.title),
    yaxis: { ...axisLayout(panel.y, theme, values, panel.y.title === panel.title ? "" : panel.y.title), exponentformat: "e" },
  };
}

function panelTraces(panel, theme, armOf, arms, span, withScale = false) {
  if (panel.heat) return [heatTrace(panel.heat, panel, theme, span, withScale)];
  return panel.curves.map((curve) => curveTrace(curve, panel, styleOf(armOf(curve.group), arms, theme)));
}
