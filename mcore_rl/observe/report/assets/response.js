// One response: its texts and facts, and its tokens in colors.

const SHOWN = new Set("prompt images response digest line messages judge versions masked temperatures".split(" "));
const MODES = ["engine - trainer difference", "weight version", "loss mask"];

function responseItem(run, row, record) {
  const badge = (text, kind = "") => element("span", { class: `badge ${kind}` }, text);
  const head = element("summary", {},
    element("b", {}, `step ${row.step}${row.validation ? " (validation)" : ""}, group ${record.group}, sample ${record.sample}`),
    badge(row.right ? "right" : "wrong", row.right ? "good" : "bad"),
    element("span", {}, `reward ${format(record.reward)}`), element("span", {}, `${format(record.tokens)} tokens`),
    row.truncated ? badge(`truncated: ${record.finish_reason}`, "bad") : null, row.error ? badge("error", "bad") : null,
    row.tools ? badge(`${record.tool_calls} tool calls`) : null, row.tokens_recorded ? badge("per-token values") : null,
    element("span", { class: "snippet" }, visible(String(record.response).slice(0, 300).replaceAll("\n", " "))));
  const body = element("div", { class: "body" });
  const item = element("details", { class: "item" }, head, body);
  item.addEventListener("toggle", () => {
    if (item.open && !body.childElementCount) fillResponse(body, run, row, record);
  });
  return item;
}

async function fillResponse(body, run, row, record) {
  const part = (title, ...content) => body.append(element("h3", {}, title), ...content);
  const text = (value) => element("pre", { dir: "auto" }, visible(value));
  const shown = (message) => Array.isArray(message?.content)
    ? message.content.flatMap((each) => (each?.type === "image" ? thumbnails([each.image], "an answer") : [text(plain(each?.text ?? each))]))
    : [text(plain(message?.content ?? message))];
  part("Prompt", text(record.prompt), ...images(record));
  part("Response", text(record.response));
  for (const [number, answer] of (Array.isArray(record.judge) ? record.judge : []).entries()) {
    part(`Judge, answer ${number + 1}: ${answer?.error ? `no score (${answer.error})` : `score ${format(answer?.score)}`}`, text(answer?.text ?? ""));
  }
  if (Array.isArray(record.messages) && record.messages.length) {
    const messages = record.messages.map((message) => element("div", {}, element("b", {}, visible(message?.role ?? "")), ...shown(message)));
    part("Conversation", element("details", {}, element("summary", {}, `${messages.length} messages`), ...messages));
  }
  const facts = Object.entries(record).filter(([name, value]) => !SHOWN.has(name) && value !== null);
  part("Facts", table(["name", "value"], facts.map(([name, value]) => [name, plain(value)])));
  part("Versions", text((Array.isArray(record.versions) ? record.versions : []).map(([version, first, end]) => `version ${version}: tokens ${first} to ${end - 1}`).join("\n")));
  const values = row.tokens_recorded ? (await block(`${run.prefix}tokens${row.step}`)).find((each) => each.digest === record.digest) : null;
  if (values) part("Tokens", tokenView(values, record));
  const end = values ? "" : "No per-token values are recorded for this response (observe.token_responses).";
  const last = element("p", { class: "dim" }, end);
  last.dataset.complete = "true";
  body.append(last);
}

// Thumbnails of the images of the prompt or of an answer. Other addresses, and files that were cut for their length, are not shown.
const THUMBNAIL = /^data:image\/jpeg;base64,[A-Za-z0-9+/]+=*$/;
const thumbnails = (addresses, place) => addresses
  .filter((each) => THUMBNAIL.test(each))
  .map((each, number) => element("img", { src: each, alt: `image ${number + 1}`, title: `image ${number + 1} of ${place}` }));
const images = (record) => thumbnails(Array.isArray(record.images) ? record.images : [], "the prompt");

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function tokenView(values, record) {
  const masked = new Set((record.masked ?? []).flatMap(([first, end]) => range(first, Math.min(end, values.texts.length))));
  const spans = Array.isArray(record.versions) ? record.versions : [];
  const versions = values.texts.map((text, place) => spans.find(([, first, end]) => first <= place && place < end)?.[0] ?? null);
  let trained = 0;
  const tokens = values.texts.map((text, place) => {
    const own = masked.has(place) ? null : trained++;
    const engine = own === null ? null : values.engine[own], trainer = own === null ? null : values.trainer[own];
    const known = typeof engine === "number" && typeof trainer === "number";
    return { text, place, version: versions[place], masked: own === null, engine, trainer, difference: known ? engine - trainer : null };
  });
  const sizes = tokens.map((token) => Math.abs(token.difference ?? 0)), largest = Math.max(0, ...sizes);
  const known = tokens.filter((token) => token.difference !== null);
  const legend = element("p", { class: "dim" });
  const holder = element("div", { class: "text tokens", dir: "auto" });
  const choice = element("select", {}, ...MODES.map((mode) => element("option", {}, mode)));
  const paint = () => {
    const mode = MODES.indexOf(choice.value);
    // Differences of rounding stay pale: full color needs at least 0.01 nats.
    holder.replaceChildren(...tokens.map((token) => tokenSpan(token, mode, Math.max(largest, 0.01))));
    const mean = known.reduce((sum, token) => sum + Math.abs(token.difference), 0) / Math.max(known.length, 1);
    const words = [
      `Red: the engine's log-probability is higher; blue: the trainer's. Mean difference ${format(mean)} nats, largest ${format(largest)} at token ${sizes.indexOf(largest)}.`,
      `Weight versions: ${[...new Set(versions.filter((version) => version !== null && version >= 0))].join(", ")}.`,
      `${masked.size} of ${tokens.length} tokens are not trained (struck out).`,
    ];
    legend.textContent = words[mode] + (record.tokens > tokens.length ? ` Tokens after ${format(tokens.length)} are left out.` : "");
  };
  choice.addEventListener("change", paint);
  paint();
  return element("div", {}, element("label", {}, "color: ", choice), legend, holder);
}

function tokenSpan(token, mode, largest) {
  const style = {};
  if (mode === 0 && token.difference !== null) {
    const strength = Math.min(1, Math.abs(token.difference) / largest) * 0.75;
    style.background = `rgba(${token.difference > 0 ? "220, 60, 60" : "60, 110, 220"}, ${strength})`;
  }
  if (mode === 1 && token.version >= 0 && token.version !== null) style.background = `hsla(${(token.version * 67) % 360}, 70%, 50%, 0.35)`;
  if (mode === 2 && !token.masked) style.background = "rgba(34, 160, 107, 0.35)";
  const title = token.masked ? `token ${token.place}: not trained` :
    `token ${token.place}: engine ${format(token.engine)}, trainer ${format(token.trainer)}, difference ${format(token.difference)} nats, version ${token.version}`;
  return element("span", { class: token.masked ? "token masked" : "token", title, style }, visible(token.text));
}

const range = (first, end) => Array.from({ length: Math.max(0, end - first) }, (_, place) => first + place);
