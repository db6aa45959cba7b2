// Curves of all runs: one chart per entry of summary.charts, and one for any other metric.

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const MAX_LINES = 16;
const plots = [];
const SYNC = uPlot.sync("steps");

function showCurves(summary) {
  const holder = byId("charts"), smoothing = byId("smoothing"), other = byId("other");
  const all = [...new Set(summary.runs.flatMap((run) => Object.keys(run.series.values)))].sort();
  const shown = new Set(), charts = [];
  // A metric that one chart names is not repeated by the prefix of another one.
  const named = new Set(summary.charts.flatMap((chart) => chart.patterns));
  for (const chart of summary.charts) {
    const names = [...new Set(chart.patterns.flatMap((pattern) => matching(all, pattern, named)))];
    names.forEach((name) => shown.add(name));
    if (names.length) charts.push({ ...chart, names, panel: chartPanel(holder, chart.title, chart.unit) });
  }
  const rest = { title: "Other metric", unit: "", names: [], panel: chartPanel(holder, "Other metric", "") };
  rest.panel.hidden = true;
  other.append(...all.filter((name) => !shown.has(name)).map((name) => element("option", { value: name }, name)));
  const draw = (chart) => drawChart(summary.runs, chart, Number(smoothing.value));
  // Charts are made when they become visible, so that the page opens fast.
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((each) => each.panel === entry.target);
      if (entry.isIntersecting && chart && !chart.plot) draw(chart);
    }
  }, { rootMargin: "300px" });
  charts.forEach((chart) => observer.observe(chart.panel));
  smoothing.addEventListener("input", () => [...charts, rest].filter((chart) => chart.plot).forEach(draw));
  other.addEventListener("change", () => {
    rest.names = other.value ? [other.value] : [];
    rest.panel.hidden = !other.value;
    rest.panel.querySelector("h3").textContent = other.value;
    if (other.value) draw(rest);
  });
}

function matching(all, pattern, named) {
  if (!pattern.endsWith("*")) return all.filter((name) => name === pattern);
  return all.filter((name) => name.startsWith(pattern.slice(0, -1)) && !named.has(name));
}

function chartPanel(holder, title, unit) {
  const panel = element("div", { class: "chart" }, element("h3", {}, title, unit ? element("span", { class: "dim" }, ` ${unit}`) : null));
  holder.append(panel);
  return panel;
}

function drawChart(runs, chart, smoothing) {
  // By metric first, so that all runs have their main metric if there are too many lines.
  const all = chart.names.flatMap((name) => runs.map((run, number) => ({ run, number, name })))
    .filter(({ run, name }) => run.series.values[name]);
  const lines = all.slice(0, MAX_LINES);
  if (all.length > MAX_LINES) chart.panel.querySelector("h3").title = `${MAX_LINES} of ${all.length} lines are shown`;
  if (!lines.length) return;
  const data = uPlot.join(lines.map(({ run, name }) => [run.series.steps, smooth(run.series.values[name], smoothing)]));
  const several = runs.length > 1;
  const series = lines.map(({ run, number, name }, place) => ({
    label: several ? `${run.name}: ${name}` : name,
    stroke: COLORS[(several ? number : place) % COLORS.length],
    dash: several ? DASHES[chart.names.indexOf(name) % DASHES.length] : [],
    width: 1.5,
    spanGaps: true,
    points: { show: run.series.values[name].filter((value) => value !== null).length < 60, size: 4 },
    value: (plot, value) => format(value),
  }));
  const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 } };
  chart.plot?.destroy();
  const width = Math.max(200, chart.panel.clientWidth - 18);
  const options = {
    width, height: 210, cursor: { sync: { key: SYNC.key } }, scales: { x: { time: false } },
    axes: [{ ...axis }, { ...axis, size: 62, values: (plot, values) => values.map(format) }],
    series: [{ label: "step" }, ...series],
  };
  chart.plot = new uPlot(options, data, chart.panel);
  const plot = chart.plot;
  plots.push(plot);
  plot.over.addEventListener("click", () => {
    if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) select({ step: plot.data[0][plot.cursor.idx] });
  });
  new ResizeObserver(() => {
    const now = Math.max(200, chart.panel.clientWidth - 18);
    if (chart.plot === plot && now !== plot.width) plot.setSize({ width: now, height: 210 });
  }).observe(chart.panel);
}

// Exponential moving average over the known values; steps without a value stay empty.
function smooth(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}
