// Overview, configuration, theme, and the start of the page.

function showOverview(summary) {
  byId("written").textContent = `written ${summary.written}`;
  byId("runs").append(...summary.runs.map((run, place) => {
    const progress = run.last_step === null ? "no step is recorded" : `step ${run.last_step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
    const unfinished = run.total_steps && run.last_step < run.total_steps ? "(in progress, stopped or failed) " : "";
    return element("div", {},
      element("p", {}, element("span", { class: "dot", style: { background: COLORS[place % COLORS.length] } }),
        element("b", {}, run.name), ` ${progress} ${unfinished}`, element("span", { class: "dim" }, run.directory)),
      element("pre", { class: "table" }, run.table));
  }));
  const several = summary.runs.length > 1;
  const alerts = summary.runs.flatMap((run) => run.alerts.map(({ step, text }) => [...(several ? [run.name] : []), step ?? "", text]));
  byId("alerts").append(alerts.length ? table([...(several ? ["run"] : []), "step", "warning"], alerts, "alert") : "none");
}

function showConfiguration(summary) {
  const holder = byId("config"), names = summary.runs.map((run) => run.name);
  if (names.length > 1) {
    const rows = summary.differences.map(([key, values]) => [key, ...values.map((value) => (value === null ? "-" : plain(value)))]);
    holder.append(element("h3", {}, "Differences"), rows.length ? table(["key", ...names], rows) : "none");
  }
  for (const run of summary.runs) {
    const rows = Object.entries(run.config);
    holder.append(element("details", {}, element("summary", {}, `${run.name}: all ${rows.length} keys`), table(["key", "value"], rows)));
  }
}

function connectTheme() {
  const root = document.documentElement, isDark = () => css("color-scheme").includes("dark") || getComputedStyle(root).colorScheme === "dark";
  const redraw = () => {
    plots.forEach((plot) => plot.root.isConnected && plot.redraw(false));
    document.querySelectorAll("canvas").forEach((each) => each.redraw?.());
  };
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

async function start() {
  const summary = await block("summary");
  showOverview(summary);
  showCurves(summary);
  showStep(summary);
  showBrowser(summary);
  showConfiguration(summary);
  connectTheme();
  select({ run: 0, step: null });
  // For tests and scripts that wait for the page.
  document.body.dataset.ready = "true";
}

start();
