// A comparison of evaluations: plots of means and of differences, and tasks that changed sides.
const ROW = 34, WIDTH = 340;
const colourOf = (name) => `var(--s${data.contenders.findIndex((c) => c.name === name) % 8})`;
const shown = (v, share) => (share ? percent(v) : number(v));
const signed = (v, share) => (v > 0 ? "+" : "") + (share ? (100 * v).toFixed(1) : number(v));
const titleOf = (row) => `${row.environment}, ${row.metric.replaceAll("_", " ")}`;
const LONGEST = 30; // characters of a name in a plot; the end tells steps apart
const pText = (p) => (p == null ? "" : p < 1e-4 ? "p < 0.0001" : `p = ${p.toFixed(4)}`);

/** Points with intervals, a row each: [{label, colour, mean, ci_low, ci_high, text}]; `zero` draws the line of no difference. */
function forest(rows, share, zero) {
  const values = rows.flatMap((r) => [r.mean, r.ci_low, r.ci_high]).filter((v) => v != null).concat(zero ? [0] : []);
  let low = Math.min(...values), high = Math.max(...values);
  if (share && !zero) { low = 0; high = 1; }
  if (low === high) { low -= 1; high += 1; }
  if (zero) { const most = Math.max(-low, high); low = -most; high = most; }
  const x = (v) => 8 + ((WIDTH - 16) * (v - low)) / (high - low);
  const bottom = rows.length * ROW + 4;
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${bottom + 18}`, role: "img", "aria-label": rows.map((r) => `${r.label} ${r.text}`).join("; ") });
  root.style.height = "auto";
  root.append(svg("line", { x1: 8, x2: WIDTH - 8, y1: bottom, y2: bottom, class: "grid" }));
  for (const [v, anchor] of [[low, "start"], ...(zero ? [[0, "middle"]] : []), [high, "end"]]) {
    root.append(svg("text", { x: x(v), y: bottom + 13, "text-anchor": anchor, text: zero ? signed(v, share) : shown(v, share) }));
  }
  if (zero) root.append(svg("line", { x1: x(0), x2: x(0), y1: 0, y2: bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3" }));
  rows.forEach((r, i) => {
    const y = i * ROW + 26;
    const text = svg("text", { x: 8, y: y - 12, text: r.label.length > LONGEST ? "…" + r.label.slice(1 - LONGEST) : r.label });
    root.append(text, svg("text", { x: WIDTH - 8, y: y - 12, "text-anchor": "end", text: r.text }));
    if (r.ci_low != null) root.append(svg("line", { x1: x(r.ci_low), x2: x(r.ci_high), y1: y, y2: y, stroke: r.colour, "stroke-width": 4, "stroke-linecap": "round", opacity: 0.45 }));
    if (r.mean != null) root.append(svg("circle", { cx: x(r.mean), cy: y, r: 5, fill: r.colour }));
  });
  return root;
}

function card(title, plot, ...lines) {
  return el("figure", { class: "card chart flat" }, el("figcaption", {}, el("h3", { text: title })), plot, ...lines.map((text) => el("p", { class: "muted", text })));
}

function metrics() {
  const varied = (m) => m.estimates.some((e) => e.ci_low != null || e.mean !== m.estimates[0].mean);
  const equal = data.metrics.filter((m) => !varied(m)).map((m) => `${titleOf(m)}: ${shown(m.estimates[0].mean, m.share)}`);
  byId("metrics-equal").textContent = equal.length ? `The same for every task, and not drawn: ${equal.join("; ")}.` : "";
  for (const m of data.metrics.filter(varied)) {
    const rows = m.estimates.map((e) => ({ ...e, label: e.name, colour: colourOf(e.name), text: shown(e.mean, m.share) }));
    const tasks = [...new Set(m.estimates.map((e) => e.n))].join(" or ");
    byId("metric-cards").append(card(titleOf(m), forest(rows, m.share, false), `${tasks} tasks`));
  }
}

function differences() {
  const groups = new Map(), differ = (d) => d.mean !== 0 || d.ci_low != null;
  for (const d of data.differences) groups.set(titleOf(d), [...(groups.get(titleOf(d)) || []), d]);
  const share = (d) => data.metrics.find((m) => m.environment === d.environment && m.metric === d.metric).share;
  byId("differences-about").textContent = `From ${data.contenders[0].name}, in pairs of the same task. p: of no difference, by all signs of the tasks' differences; after Holm's correction for all of this page below 0.05, a difference is clear.`;
  for (const [title, rows] of groups) {
    if (!rows.some(differ)) continue;
    const lines = rows.filter((d) => d.p != null).map((d) => `${rows.length > 1 ? d.b + ": " : ""}${pText(d.p)}, corrected ${pText(d.p_holm).replace("p = ", "").replace("p ", "")}${d.p_holm < 0.05 ? ": clear" : ""}`);
    const drawn = rows.map((d) => ({ ...d, label: d.b, colour: colourOf(d.b), text: d.mean == null ? "–" : signed(d.mean, share(d)) }));
    byId("difference-cards").append(card(title + (share(rows[0]) ? ", in percentage points" : ""), forest(drawn, share(rows[0]), true), ...lines));
  }
}

function changes() {
  const better = data.changes.filter((c) => c.gain > 0).length;
  byId("changes-about").textContent = data.changes.length
    ? `${data.changes.length} tasks: ${better} are solved now, ${data.changes.length - better} no longer. A task is solved by a model that solves it in half of its samples or more; of each model the first reply is shown that puts it on its side.`
    : "No task is solved by one and not by the other.";
  const side = (name, reply) => el("div", { class: "message assistant" }, el("div", { class: "role", text: name }), el("p", { class: "text", text: reply || "(nothing)" }));
  for (const c of data.changes) {
    byId("change-list").append(el("details", { class: "rollout" },
      el("summary", {}, el("span", { class: `chip ${c.gain > 0 ? "good" : "bad"}`, text: c.gain > 0 ? "solved" : "lost" }),
        el("span", { class: "numbers side", text: `${c.solved_a}/${c.of_a} → ${c.solved_b}/${c.of_b}` }),
        el("span", { class: "what", text: `${c.environment} · ${c.task}` }), el("span", { class: "numbers", text: c.b })),
      el("div", { class: "body" }, el("div", { class: "message user" }, el("div", { class: "role", text: "user" }), el("p", { class: "text", text: c.question })),
        side(c.a, c.reply_a), side(c.b, c.reply_b))));
  }
}

function contenders() {
  byId("notes").append(...data.notes.map((text) => el("p", { class: "notice", text })));
  for (const c of data.contenders) {
    const left = Object.values(c.left_out).reduce((sum, n) => sum + n, 0);
    const words = [c.model, `${whole.format(c.episodes)} episodes`, left && `${left} left out`, c.cost != null && `cost ${number(c.cost)}`].filter(Boolean);
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = colourOf(c.name);
    byId("facts").append(el("div", {}, el("dt", {}, swatch, c.name), el("dd", { text: words.join(" · ") })));
  }
}

contenders();
metrics();
differences();
changes();
