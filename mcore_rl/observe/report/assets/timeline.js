// Phases of the selected step: one row per process and lane.

const ROW = 20, LABELS = 130;

async function showTimeline(run) {
  const step = selection.step, holder = byId("timeline");
  const [extent, processes, ...spans] = await block(`${run.prefix}spans${step}`);
  if (step !== selection.step) return;
  if (!extent) {
    return holder.replaceChildren(element("span", { class: "dim" }, "no phases are recorded for this step; timeline.json opens in Perfetto"));
  }
  const places = new Map();
  for (const [process, lane] of [...spans].sort((one, two) => one[0] - two[0] || one[1] - two[1])) {
    const key = `${process}.${lane}`;
    if (!places.has(key)) places.set(key, { process, lane, row: places.size });
  }
  const rows = [...places.values()];
  const rowOf = (span) => places.get(`${span[0]}.${span[1]}`).row;
  const view = { from: extent[0], to: extent[1] };
  const height = rows.length * ROW + 22;
  // The longest span comes first, so that nested spans are drawn over it.
  const made = canvas(holder, height, (context, width) => {
    const x = (time) => LABELS + ((time - view.from) / (view.to - view.from)) * (width - LABELS);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const span of spans) {
      const [, , name, start, duration] = span, left = Math.max(LABELS, x(start)), right = Math.min(width, x(start + duration));
      if (right < LABELS || left > width) continue;
      context.fillStyle = colorOf(name);
      context.fillRect(left, rowOf(span) * ROW + 2, Math.max(1, right - left), ROW - 4);
      if (right - left > 7 * name.length) {
        context.fillStyle = "#ffffff";
        context.fillText(name, left + 4, rowOf(span) * ROW + ROW / 2);
      }
    }
    context.fillStyle = css("--panel");
    context.fillRect(0, 0, LABELS, height);
    context.fillStyle = css("--text");
    for (const row of rows) if (!row.lane) context.fillText(processes[row.process].slice(0, 22), 4, row.row * ROW + ROW / 2);
    context.fillStyle = css("--dim");
    for (let part = 0; part <= 4; part++) {
      const time = view.from + (part / 4) * (view.to - view.from);
      context.textAlign = part === 4 ? "right" : part ? "center" : "left";
      context.fillText(`${format(time / 1000)} s`, x(time), height - 9);
    }
    context.textAlign = "left";
  });
  made.id = "timeline-canvas";
  connectTimeline(made, spans, processes, rowOf, view, extent);
  holder.append(element("p", { class: "dim" }, "Gaps are idle time. Drag to zoom, double click to reset."));
}

function connectTimeline(made, spans, processes, rowOf, view, extent) {
  const timeAt = (event) => view.from + ((event.offsetX - LABELS) / (made.clientWidth - LABELS)) * (view.to - view.from);
  let pressed = null;
  made.addEventListener("mousedown", (event) => { pressed = timeAt(event); });
  made.addEventListener("mouseup", (event) => {
    const [from, to] = [pressed, timeAt(event)].sort((one, two) => one - two);
    if (pressed !== null && to - from > (view.to - view.from) / 100) Object.assign(view, { from, to });
    pressed = null;
    made.redraw();
  });
  made.addEventListener("dblclick", () => {
    Object.assign(view, { from: extent[0], to: extent[1] });
    made.redraw();
  });
  made.addEventListener("mousemove", (event) => {
    const time = timeAt(event), row = Math.floor(event.offsetY / ROW);
    // The last hit is the innermost span.
    const hit = spans.findLast((span) => rowOf(span) === row && span[3] <= time && time <= span[3] + span[4]);
    hint(hit ? `${processes[hit[0]]}: ${hit[2]}, ${format(hit[4] / 1000)} s` : "", event);
  });
  made.addEventListener("mouseleave", () => hint(""));
}

// Equal names have equal colors in all steps.
function colorOf(name) {
  let hash = 7;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) % 3600;
  return `hsl(${hash / 10}, 45%, 45%)`;
}
