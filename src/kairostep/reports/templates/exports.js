// PNG and CSV of a figure as it is shown, for papers: on white, large letters left to the caption.

const SIZE = { width: 460, height: 320, scale: 3, legend: 26 };

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function fileName(text) {
  return text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "figure";
}

function quoted(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function toCsv(rows) {
  return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

// One line per value: the panel, the run, x, y, and the standard error or the value at x and y
function figureRows(figure, isShown) {
  const rows = [["panel", "name", "x_title", "y_title", "x", "y", figure.panels.some((panel) => panel.heat) ? "value" : "standard_error"]];
  for (const panel of figure.panels) {
    const titles = [panel.x.title, panel.y.title];
    for (const curve of panel.curves.filter((curve) => isShown(curve.group)))
      curve.x.forEach((x, i) => rows.push([panel.title, curve.name, ...titles, x, curve.y[i], curve.errors[i]]));
    const heat = panel.heat;
    if (heat && isShown(heat.group))
      heat.x.forEach((x, i) => heat.y.forEach((y, j) => rows.push([panel.title, heat.name, ...titles, x, y, heat.z[j][i]])));
  }
  return rows;
}

function tableRows(table) {
  const cells = (row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " "));
  return [...table.rows].map(cells);
}

async function panelImage(panel, view) {
  const layout = panelLayout(panel, THEMES.light);
  Object.assign(layout, { width: SIZE.width, height: SIZE.height, paper_bgcolor: "#fff", plot_bgcolor: "#fff" });
  layout.title = { text: plain(panel.title), font: { size: 14 }, x: 0.02, xanchor: "left" };
  layout.margin.t = panel.title ? 36 : 10;
  const shown = { ...panel, curves: panel.curves.filter((curve) => view.isShown(curve.group)) };
  const data = panelTraces(shown, THEMES.light, view.armOf, view.arms, view.span, true);
  const address = await Plotly.toImage({ data, layout }, { format: "png", ...SIZE });
  const image = new Image();
  await new Promise((done, failed) => Object.assign(image, { onload: done, onerror: failed, src: address }));
  return image;
}

function drawLegend(context, arms, view, top, width) {
  context.font = `${13 * SIZE.scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  let left = 12 * SIZE.scale, middle = top + (SIZE.legend * SIZE.scale) / 2;
  for (const arm of arms) {
    const wide = 34 * SIZE.scale + context.measureText(arm).width;
    if (left + wide > width) [left, middle] = [12 * SIZE.scale, middle + SIZE.legend * SIZE.scale];
    context.fillStyle = styleOf(arm, view.arms, THEMES.light).color;
    context.fillRect(left, middle - 5 * SIZE.scale, 10 * SIZE.scale, 10 * SIZE.scale);
    context.fillStyle = THEMES.light.ink;
    context.fillText(arm, left + 15 * SIZE.scale, middle);
    left += wide;
  }
}

async function figureImage(figure, view) {
  const panels = figure.panels.filter((panel) => (panel.heat ? view.isShown(panel.heat.group) : panel.curves.some((curve) => view.isShown(curve.group))));
  const images = [];
  for (const panel of panels) images.push(await panelImage(panel, view));
  const arms = view.arms.filter((arm) => panels.some((panel) => panel.curves.some((curve) => view.isShown(curve.group) && view.armOf(curve.group) === arm)));
  const columns = Math.min(images.length === 4 ? 2 : 3, Math.max(1, images.length)), rows = Math.ceil(images.length / columns);
  const canvas = document.createElement("canvas");
  const lines = arms.length > 1 ? Math.ceil(arms.reduce((sum, arm) => sum + 34 + 8 * arm.length, 0) / (columns * SIZE.width - 24)) : 0;
  [canvas.width, canvas.height] = [columns * SIZE.width * SIZE.scale, (rows * SIZE.height + (lines && lines * SIZE.legend + 8)) * SIZE.scale];
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  images.forEach((image, i) => context.drawImage(image, (i % columns) * SIZE.width * SIZE.scale, Math.floor(i / columns) * SIZE.height * SIZE.scale));
  if (lines) drawLegend(context, arms, view, rows * SIZE.height * SIZE.scale, canvas.width);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
