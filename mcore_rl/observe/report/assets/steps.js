// The selected step: solve rates over all steps, groups and lengths of the step.

const RATES_HEIGHT = 150;

function showRates(run) {
  const { steps, rates } = run.responses, holder = byId("rates");
  if (!steps.length) return holder.replaceChildren("no responses");
  const made = canvas(holder, RATES_HEIGHT, (context, width) => {
    const wide = width / steps.length, high = RATES_HEIGHT / rates[0].length;
    context.clearRect(0, 0, width, RATES_HEIGHT);
    rates.forEach((bins, place) => {
      const total = bins.reduce((sum, count) => sum + count, 0) || 1;
      bins.forEach((count, bin) => {
        if (!count) return;
        context.fillStyle = `rgba(${css("--shade")}, ${0.08 + 0.92 * (count / total)})`;
        context.fillRect(place * wide, RATES_HEIGHT - (bin + 1) * high, Math.max(1, wide - (wide > 4 ? 1 : 0)), high - 1);
      });
      if (steps[place] === selection.step) {
        context.strokeStyle = css("--text");
        context.strokeRect(place * wide + 0.5, 0.5, Math.max(2, wide - 1), RATES_HEIGHT - 1);
      }
    });
  });
  const at = (event) => Math.min(steps.length - 1, Math.floor((event.offsetX / made.clientWidth) * steps.length));
  made.id = "rates-canvas";
  made.addEventListener("click", (event) => select({ step: steps[at(event)] }));
  made.addEventListener("mousemove", (event) => {
    const bins = rates[at(event)], bin = Math.floor((1 - event.offsetY / RATES_HEIGHT) * bins.length);
    const rate = bin <= 0 ? "0" : bin >= bins.length - 1 ? "1" : `about ${format(bin / (bins.length - 1))}`;
    hint(`step ${steps[at(event)]}: ${bins[Math.max(0, Math.min(bin, bins.length - 1))]} groups with solve rate ${rate}`, event);
  });
  made.addEventListener("mouseleave", () => hint(""));
  holder.append(element("p", { class: "dim" }, "Rows: solve rates from 0 (bottom) to 1 (top); the outer rows are exactly 0 and 1. Strong color: many groups. Click to select a step."));
}

async function showGroups(run) {
  const step = selection.step, holder = byId("groups");
  const groups = await block(`${run.prefix}groups${step}`);
  if (step !== selection.step) return;
  if (!groups.length) return holder.replaceChildren(element("span", { class: "dim" }, "no groups recorded for this step"));
  groups.sort((one, two) => two[2] / two[1] - one[2] / one[1]);
  holder.replaceChildren(...groups.map(([group, count, right]) => element("button", {
    type: "button", title: `group ${group}: ${right} of ${count} right`,
    style: { background: `rgba(${css("--shade")}, ${0.05 + (0.6 * right) / count})` },
    onclick: () => filterBy({ step, group }),
  }, `${right}/${count}`)));
}

function showLengths(run) {
  const { steps, lengths, edges } = run.responses, holder = byId("lengths"), place = steps.indexOf(selection.step);
  holder.replaceChildren();
  if (place < 0) return holder.append(element("span", { class: "dim" }, "no responses recorded for this step"));
  const [wrong, right] = lengths[place];
  const used = edges.map((edge, bin) => bin).filter((bin) => lengths.some((each) => each[0][bin] + each[1][bin]));
  const highest = Math.max(1, ...used.map((bin) => wrong[bin] + right[bin]));
  for (let bin = used[0] ?? 0; bin <= (used[used.length - 1] ?? -1); bin++) {
    const part = (name, count) => element("div", { class: name, style: { height: `${(82 * count) / highest}%` } });
    const end = edges[bin + 1] ? edges[bin + 1] - 1 : "";
    const title = `${edges[bin]} to ${end} tokens: ${right[bin]} right, ${wrong[bin]} wrong`;
    holder.append(element("div", { class: "bin", title }, part("wrong", wrong[bin]), part("right", right[bin]), `${edges[bin]}`));
  }
}

function showStep(summary) {
  const range = byId("step-range"), choice = byId("run");
  choice.append(...summary.runs.map((run, number) => element("option", { value: number }, run.name)));
  byId("run-label").hidden = summary.runs.length < 2;
  const steps = () => {
    const run = summary.runs[selection.run];
    return [...new Set([...run.series.steps, ...run.responses.steps, ...run.timeline])].sort((one, two) => one - two);
  };
  choice.addEventListener("change", () => select({ run: Number(choice.value), step: null }));
  byId("of-step").addEventListener("click", () => filterBy({ step: selection.step }));
  range.addEventListener("input", () => select({ step: steps()[Number(range.value)] }));
  listeners.push((change) => {
    const run = summary.runs[selection.run], all = steps();
    if (!all.includes(selection.step)) {
      // The newest step before the selected one; the newest of all if none is selected.
      selection.step = all.filter((step) => selection.step === null || step <= selection.step).pop() ?? all[0] ?? null;
    }
    range.max = Math.max(0, all.length - 1);
    range.value = all.indexOf(selection.step);
    byId("step-number").textContent = selection.step ?? "";
    if ("run" in change || !byId("rates-canvas")) showRates(run);
    else byId("rates-canvas").redraw();
    showTimeline(run);
    showGroups(run);
    showLengths(run);
  });
}
