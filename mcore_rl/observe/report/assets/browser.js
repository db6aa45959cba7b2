// List of sampled responses with filters. Facts of all responses are in the summary; texts are loaded block by block.

const PAGE = 30;
const list = { rows: [], found: [], first: 0, request: 0, shown: 0 }; // numbers of the newest and the shown search

const CHOICES = {
  result: { all: () => true, right: (row) => row.right, wrong: (row) => !row.right },
  kind: { training: (row) => !row.validation, validation: (row) => row.validation, all: () => true },
};
const FLAGS = { truncated: "truncated", error: "error", tools: "tool use", tokens_recorded: "per-token values" };
const ORDERS = {
  "newest step": (one, two) => two.step - one.step || one.order - two.order,
  "highest reward": (one, two) => two.reward - one.reward,
  "lowest reward": (one, two) => one.reward - two.reward,
  longest: (one, two) => two.tokens - one.tokens,
};

function rowsOf(run) {
  const { pages, index } = run.responses, rows = [];
  let order = 0;
  for (const [page, step, validation, count] of pages) {
    for (let place = 0; place < count; place++, order++) {
      const row = { page, place, step, validation, order };
      for (const name of Object.keys(index)) row[name] = index[name][order];
      rows.push(row);
    }
  }
  return rows;
}

function showBrowser(summary) {
  const form = byId("filters");
  const choice = (name, options) => element("label", {}, `${name} `, element("select", { name }, ...options.map((option) => element("option", {}, option))));
  form.append(
    element("label", {}, "step ", element("input", { name: "step", type: "number", placeholder: "all" })),
    element("label", {}, "group ", element("input", { name: "group", type: "number", placeholder: "all" })),
    choice("result", Object.keys(CHOICES.result)), choice("kind", Object.keys(CHOICES.kind)), choice("order", Object.keys(ORDERS)),
    ...Object.entries(FLAGS).map(([name, text]) => element("label", {}, element("input", { name, type: "checkbox" }), ` ${text}`)),
    element("label", { class: "wide" }, "text ", element("input", { name: "text", type: "search", placeholder: "in prompt or response" })),
    element("button", { type: "reset" }, "reset"),
  );
  const update = () => findResponses(summary.runs[selection.run]);
  let waiting;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(update, 200); });
  form.addEventListener("reset", () => setTimeout(update));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => turnPage(summary, -PAGE));
  byId("next").addEventListener("click", () => turnPage(summary, PAGE));
  listeners.push((change) => {
    if (!("run" in change)) return;
    list.rows = rowsOf(summary.runs[selection.run]);
    update();
  });
}

// Shows the responses of one group or step; used by other parts of the page.
function filterBy(values) {
  const form = byId("filters");
  form.reset();
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  form.dispatchEvent(new Event("input"));
  byId("responses").scrollIntoView();
}

async function findResponses(run) {
  const request = ++list.request, values = byId("filters").elements, text = values.text.value.toLowerCase();
  const passes = [CHOICES.result[values.result.value], CHOICES.kind[values.kind.value]];
  for (const name of ["step", "group"]) if (values[name].value !== "") passes.push((row) => row[name] === Number(values[name].value));
  for (const name of Object.keys(FLAGS)) if (values[name].checked) passes.push((row) => row[name]);
  let found = list.rows.filter((row) => passes.every((pass) => pass(row)));
  if (text) {
    const matches = [];
    for (const row of found) {
      const record = (await block(row.page))[row.place];
      // A newer request has replaced this one.
      if (request !== list.request) return;
      if (`${record.prompt}\n${record.response}`.toLowerCase().includes(text)) matches.push(row);
    }
    found = matches;
  }
  if (request !== list.request) return;
  list.found = found.sort(ORDERS[values.order.value]);
  list.first = 0;
  await showList(run);
}

function turnPage(summary, by) {
  list.first = Math.max(0, Math.min(list.first + by, list.found.length - 1));
  showList(summary.runs[selection.run]);
}

async function showList(run) {
  const request = list.request, { found, first } = list, last = Math.min(first + PAGE, found.length);
  const recorded = run.responses.pages.reduce((sum, page) => sum + page[4], 0);
  const items = await Promise.all(found.slice(first, last).map(async (row) => responseItem(run, row, (await block(row.page))[row.place])));
  if (request !== list.request) return;
  byId("found").textContent = `${found.length ? first + 1 : 0} to ${last} of ${format(found.length)} responses; ` +
    `the report has ${format(list.rows.length)} of the run's ${format(recorded)}`;
  byId("list").replaceChildren(...items);
  byId("previous").disabled = !first;
  byId("next").disabled = last >= found.length;
  list.shown = request;
}
