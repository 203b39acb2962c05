// ---- results -------------------------------------------------------------------------------------
function results() {
  const { before, after, facts, finished } = data.headline;
  for (const problem of data.problems) byId("problems").append(el("p", { class: "notice", text: problem }));
  if (!finished) byId("problems").append(el("p", { class: "notice", text: "This run has no summary yet: it is going on, or was interrupted." }));
  for (const last of after) {
    const first = before.find((e) => e.environment === last.environment && e.metric === last.metric);
    byId("evals").append(evaluation(first, last));
  }
  if (!after.length) byId("evals").append(el("p", { class: "muted", text: "No evaluation so far." }));
  const { warnings } = data;
  byId("warnings").hidden = !warnings.length;
  byId("warnings-count").textContent = warnings.length === 1 ? "1 warning of this run" : `${warnings.length} warnings of this run`;
  byId("warnings-list").append(...warnings.map(([level, text, count]) => el("li", { class: level, text: text + (count > 1 ? ` (${count} of this kind)` : "") })));
  for (const [label, value, kind] of facts) {
    byId("facts").append(el("div", {}, el("dt", { text: label }), el("dd", { text: fact(value, kind) })));
  }
}

function evaluation(first, last) {
  const show = isShare(last.metric) ? percent : number;
  const range = (e) => (e.ci_low == null && e.mean != null ? "all equal" : `${show(e.ci_low)} to ${show(e.ci_high)}`);
  const interval = (e) => range(e) + (e.n ? `, ${e.n} tasks` : "") + leftOut(e, show);
  const lines = el("div", { class: "intervals" }), verdict = judged(first, last);
  if (first) lines.append(el("span", { text: "before" }), el("span", { text: interval(first) }));
  lines.append(el("span", { text: first ? "after" : data.evaluation ? "95 % interval" : "now" }), el("span", { text: interval(last) }));
  return el("article", { class: `card ${verdict}` },
    el("h3", { text: `${last.environment}, held-out ${last.metric}${last.metric === "success" && data.samples > 1 ? ` (avg@${data.samples})` : ""}` }),
    el("p", { class: "big" },
      first && el("span", { class: "before", text: show(first.mean) }), first && el("span", { class: "before", text: "→", "aria-label": "to" }),
      el("span", { class: "after", text: show(last.mean) }), verdict && el("span", { class: "verdict", text: VERDICTS[verdict] })),
    whiskers(first, last), lines);
}

function leftOut(e, show) {
  if (!e.left_out) return "";
  const bounds = e.bound_low == null ? "" : `: ${show(e.bound_low)} to ${show(e.bound_high)} with them`;
  return ` (${e.left_out} episodes left out${bounds})`;
}

function whiskers(first, last) {
  const all = [first, last].filter(Boolean);
  const values = all.flatMap((e) => [e.mean, e.ci_low, e.ci_high]).filter((v) => v != null);
  const [low, high] = isShare(last.metric) ? [0, 1] : [Math.min(0, ...values), Math.max(...values) || 1];
  const x = (v) => 8 + (284 * (v - low)) / (high - low || 1);
  const root = svg("svg", { viewBox: "0 0 300 46", class: "whiskers", "aria-hidden": "true" });
  root.append(svg("line", { x1: 8, x2: 292, y1: 17, y2: 17, class: "grid" }));
  root.append(svg("text", { x: 8, y: 43, text: isShare(last.metric) ? "0 %" : number(low) }), svg("text", { x: 292, y: 43, "text-anchor": "end", text: isShare(last.metric) ? "100 %" : number(high) }));
  all.forEach((e, i) => {
    const colour = e === last ? "var(--after)" : "var(--soft)";
    const y = all.length === 1 ? 17 : 10 + 14 * i;
    if (e.ci_low != null) root.append(svg("line", { x1: x(e.ci_low), x2: x(e.ci_high), y1: y, y2: y, stroke: colour, "stroke-width": 4, "stroke-linecap": "round", opacity: 0.45 }));
    if (e.mean != null) root.append(svg("circle", { cx: x(e.mean), cy: y, r: 5, fill: colour }));
  });
  return root;
}

// ---- curves --------------------------------------------------------------------------------------
const MARGIN = { right: 12, top: 8, bottom: 22 };
const DIGIT = 6.8; // width of one in a mark of the y axis
const HEIGHT = 190;
let smoothing = 0.6;

/** A mark of an axis with marks every `size`: with as many digits as tell them apart. */
function mark(v, size) {
  if (size >= 1 || Math.abs(v) < 200 * size) return number(Number(v.toPrecision(6)));
  return v.toFixed(Math.ceil(-Math.log10(size) - 1e-9));
}

function tickSize(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9)) || rough;
}

function ticks(low, high, count) {
  const size = tickSize(low, high, count);
  const result = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) result.push(i * size);
  return result;
}

function chart(spec) {
  const card = el("figure", { class: "card chart" });
  card.style.margin = 0;
  const legend = el("div", { class: "legend" });
  const root = svg("svg", { role: "img", tabindex: 0, "aria-label": describe(spec) });
  const tip = el("div", { class: "tip", hidden: true, "aria-live": "polite" });
  card.append(el("figcaption", {}, el("h3", { text: spec.title })), legend, root, tip);
  const points = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  spec.series.forEach((s, i) => {
    s.colour = `var(--s${i % 8})`;
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = s.colour;
    if (spec.series.length > 1) legend.append(el("span", {}, swatch, `${s.name} `, !spec.unit && el("b", { text: number(s.y[s.y.length - 1]) })));
  });
  if (spec.series.length === 1 && !spec.unit) legend.append(el("span", {}, "last ", el("b", { text: number(spec.series[0].y[spec.series[0].y.length - 1]) })));
  if (spec.series.some((s) => s.every > 1)) legend.append(el("span", { text: `each point: mean of ${Math.max(...spec.series.map((s) => s.every))} steps` }));
  let scale = null, at = -1;
  function draw() { scale = plot(root, spec, points); point(-1); }
  function point(index) {
    at = index;
    root.querySelector(".cursor")?.remove();
    tip.hidden = index < 0;
    if (index < 0 || !scale) return;
    const x = scale.x(points[index]);
    const cursor = svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3" });
    root.append(cursor);
    tip.replaceChildren(el("b", { text: spec.unit ? `${number(points[index])} ${spec.unit}` : `step ${points[index]}` }), ...spec.series.map((s) => hover(s, points[index])).filter(Boolean));
    const left = x + 24 + tip.offsetWidth > card.clientWidth ? x - tip.offsetWidth + 4 : x + 20;
    tip.style.left = Math.max(4, left) + "px";
  }
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), wanted = scale.step(event.clientX - box.left);
    let best = 0;
    points.forEach((p, i) => { if (Math.abs(p - wanted) < Math.abs(points[best] - wanted)) best = i; });
    point(best);
  });
  root.addEventListener("pointerleave", () => point(-1));
  root.addEventListener("blur", () => point(-1));
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(Math.max(0, Math.min(points.length - 1, at < 0 ? points.length - 1 : at + move)));
  });
  new ResizeObserver(draw).observe(root);
  byId("smoothing").addEventListener("input", draw);
  return card;
}

function describe(spec) {
  const at = (x) => (spec.unit ? `${number(x)} ${spec.unit}` : `step ${x}`);
  return `${spec.title}: ` + spec.series.map((s) => `${s.name} from ${number(s.y[0])} at ${at(s.x[0])} to ${number(s.y[s.y.length - 1])} at ${at(s.x[s.x.length - 1])}`).join("; ");
}

function hover(s, step) {
  const i = s.x.indexOf(step);
  if (i < 0) return null;
  const swatch = el("i", { class: "swatch" });
  swatch.style.background = s.colour;
  const extra = s.low && s.low[i] != null ? ` [${number(s.low[i])}, ${number(s.high[i])}]` : smoothing > 0 && !s.low ? ` (smoothed ${number(smooth(s.y, smoothing)[i])})` : "";
  return el("div", {}, swatch, `${s.name} `, el("b", { text: number(s.y[i]) }), extra, s.about && el("div", { text: s.about[i] }));
}

function plot(root, spec, points) {
  const width = root.clientWidth;
  if (!width) return null;
  const values = spec.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter((v) => v != null);
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < high * 0.5) low = 0;
  if (low === high && (isShare(spec.title.toLowerCase()) ? low >= 0 && high <= 1 : low === 0)) { low = 0; high = 1; }
  else if (low === high) { low -= Math.abs(low) * 0.1; high += Math.abs(high) * 0.1; }
  const size = tickSize(low, high, 5);
  low = Math.floor(low / size + 1e-9) * size;
  high = Math.ceil(high / size - 1e-9) * size;
  const first = points[0], last = points[points.length - 1];
  const marks = Array.from({ length: Math.round((high - low) / size) + 1 }, (_, i) => low + i * size);
  const left = 14 + DIGIT * Math.max(3, ...marks.map((t) => mark(t, size).length));
  const inner = width - left - MARGIN.right, tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  const x = (step) => left + (last === first ? inner / 2 : (inner * (step - first)) / (last - first));
  const y = (v) => MARGIN.top + tall * (1 - (v - low) / (high - low));
  root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  root.replaceChildren();
  for (const t of marks) {
    root.append(svg("line", { x1: left, x2: width - MARGIN.right, y1: y(t), y2: y(t), class: "grid" }));
    root.append(svg("text", { x: left - 7, y: y(t) + 4, "text-anchor": "end", text: mark(t, size) }));
  }
  for (const t of last === first ? [first] : ticks(first, last, Math.max(2, Math.floor(inner / 80))).filter(Number.isInteger)) {
    root.append(svg("text", { x: x(t), y: HEIGHT - 5, "text-anchor": "middle", text: t }));
  }
  const line = (xs, ys) => xs.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("");
  for (const s of spec.series) {
    const path = (d, w, opacity) => root.append(svg("path", { d, fill: "none", stroke: s.colour, "stroke-width": w, opacity, "stroke-linejoin": "round" }));
    if (s.low) band(root, s, x, y);
    if (s.low || s.x.length < 3) {
      path(line(s.x, s.y), 2, 1);
      s.x.forEach((step, i) => root.append(svg("circle", { cx: x(step), cy: y(s.y[i]), r: 3.5, fill: s.colour })));
    } else if (smoothing > 0) {
      path(line(s.x, s.y), 1, 0.35);
      path(line(s.x, smooth(s.y, smoothing)), 2, 1);
    } else path(line(s.x, s.y), 1.6, 1);
  }
  return { x, step: (pixel) => first + ((pixel - left) / inner) * (last - first) };
}

function band(root, s, x, y) {
  const known = s.x.map((step, i) => [step, s.low[i], s.high[i]]).filter((p) => p[1] != null && p[2] != null);
  const upper = known.map((p) => `${x(p[0])},${y(p[2])}`), lower = known.map((p) => `${x(p[0])},${y(p[1])}`).reverse();
  root.append(svg("polygon", { points: [...upper, ...lower].join(" "), fill: s.colour, opacity: 0.16 }));
  for (const [step, low, high] of known) root.append(svg("line", { x1: x(step), x2: x(step), y1: y(low), y2: y(high), stroke: s.colour, opacity: 0.5 }));
}

function curves() {
  byId("curves").hidden = data.evaluation && data.charts.every((c) => c.series.every((s) => s.x.length < 2)); // one step
  byId("smoothing").addEventListener("input", (event) => { smoothing = Number(event.target.value); }); // before the charts listen
  byId("charts").append(...data.charts.filter((c) => !c.more).map(chart));
  const rest = data.charts.filter((c) => c.more);
  byId("more").hidden = !rest.length;
  byId("more").addEventListener("toggle", () => byId("more-charts").append(...rest.splice(0).map(chart)));
  if (!data.charts.length) byId("charts").append(el("p", { class: "muted", text: "No metrics so far." }));
}

// ---- lengths -------------------------------------------------------------------------------------
function lengths() {
  byId("lengths").hidden = !data.lengths?.rows.length;
  if (byId("lengths").hidden) return;
  const { head, rows, ended, charts } = data.lengths;
  const row = (kind, cells) => el("tr", {}, ...cells.map((cell) => el(kind, { text: typeof cell === "string" ? cell : number(cell) })));
  byId("length-table").append(row("th", head), ...rows.map((cells) => row("td", cells)));
  byId("length-table").parentNode.after(...ended.map((text) => el("p", { class: "muted", text })));
  byId("length-charts").append(...charts.map(chart));
}

// ---- forest --------------------------------------------------------------------------------------
// A node is a turn, at the height of the middle of what grows from it; a leaf has a line of its own.
const TREE = { narrow: 64, wide: 120, line: 17, left: 34, right: 190, top: 26, radius: 6 };
const COLOURS = [["entropy", "entropy of the reply (nats per token)"], ["advantage", "advantage"], ["reward", "raw reward"]];

function forests() {
  byId("forest").hidden = data.evaluation;
  byId("forest-about").textContent = data.forests.length
    ? "All that one task became, for some steps: a node is a turn, what trajectories share is one node, and each leaf is a trajectory with its raw reward. A click or Enter on a node opens its text; arrow keys move along the tree."
    : "No rollouts of training were written.";
  byId("forest-choice").hidden = !data.forests.length;
  options(byId("forest-which"), null, data.forests.map((f, i) => [i, `step ${f.step} · ${f.environment} · ${f.task} · ${f.leaves} leaves, ${f.nodes.length} turns`]));
  options(byId("forest-colour"), null, COLOURS);
  byId("forest-choice").addEventListener("submit", (event) => event.preventDefault());
  byId("forest-which").addEventListener("input", grow);
  byId("forest-colour").addEventListener("input", colourNodes);
  const most = data.forests.reduce((best, f, i, all) => (f.nodes.length > all[best].nodes.length ? i : best), 0);
  if (data.forests.length) { byId("forest-which").value = most; grow(); }
}

function grow() {
  const forest = data.forests[Number(byId("forest-which").value)], { nodes } = forest;
  const { line: y, children, root: middle, lines } = laidOut(nodes);
  const depth = Math.max(...nodes.map((n) => n.depth)) + 1;
  const free = (byId("forest-trees").clientWidth - TREE.left - TREE.right - 24) / depth;
  const column = Math.max(TREE.narrow, Math.min(TREE.wide, free));
  const at = (i) => [TREE.left + (nodes[i].depth + 1) * column, TREE.top + (y[i] + 0.5) * TREE.line];
  const start = [TREE.left, TREE.top + (middle + 0.5) * TREE.line];
  const width = TREE.left + depth * column + TREE.right, height = TREE.top + lines * TREE.line + 8;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${forest.leaves} trajectories of ${forest.task}` });
  for (let turn = 1; turn <= depth; turn++) root.append(svg("text", { x: TREE.left + turn * column, y: 14, "text-anchor": "middle", text: `turn ${turn}` }));
  nodes.forEach((n, i) => {
    root.append(svg("path", { class: "link", d: branch(...(n.parent < 0 ? start : at(n.parent)), ...at(i)), "stroke-width": Math.min(6, 1 + Math.log2(n.leaves)) }));
  });
  root.append(svg("rect", { class: "task", x: start[0] - 7, y: start[1] - 7, width: 14, height: 14, rx: 3 }), svg("text", { x: start[0] - 2, y: start[1] - 12, "text-anchor": "middle", text: "task" }));
  nodes.forEach((n, i) => {
    const [x, y1] = at(i), ended = n.ends.length > 0, failed = n.ends.some((e) => e.status === "failed");
    const mark = svg("circle", { class: `node${ended ? " leaf" : ""}${failed ? " failed" : ""}`, cx: x, cy: y1, r: TREE.radius, tabindex: i ? -1 : 0, role: "button", "data-node": i });
    mark.append(svg("title", { text: words(n) }));
    mark.setAttribute("aria-label", words(n));
    mark.addEventListener("click", () => openNode(forest, i));
    mark.addEventListener("keydown", (event) => walk(event, forest, i, { y, children }));
    root.append(mark);
    if (ended) root.append(svg("text", { x: x + 12, y: y1 + 4, text: n.ends.map(ending_of).join(", ") }));
  });
  byId("forest-trees").replaceChildren(root);
  byId("forest-node").replaceChildren(forest.left_out ? el("p", { class: "muted", text: `${forest.left_out} more trajectories are not drawn.` }) : "");
  colourNodes();
}

const ending_of = (e) => (e.reward == null ? "no score" : number(e.reward)) + (e.stop_reason === "terminated" ? "" : ` (${e.stop_reason.replaceAll("_", " ")})`);
const words = (n) => [`turn ${n.depth + 1}`, `${n.leaves} ${n.leaves === 1 ? "trajectory" : "trajectories"}`, `${n.tokens} tokens`,
  ...COLOURS.filter(([key]) => n[key] != null).map(([key]) => `${key} ${number(n[key])}`)].join(", ");

function colourNodes() {
  const forest = data.forests[Number(byId("forest-which").value)], key = byId("forest-colour").value;
  const [low, high] = ends(forest.nodes.map((n) => n[key]), key);
  for (const mark of document.querySelectorAll("#forest-trees .node")) mark.style.fill = heat(forest.nodes[mark.dataset.node][key], low, high);
  byId("forest-legend").replaceChildren(...(low != null ? [number(low), el("i", { class: "gradient", "aria-hidden": "true" }), number(high)] : ["not known here"]));
}

function walk(event, forest, i, { y, children }) {
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); openNode(forest, i); return; }
  const row = forest.nodes.map((n, j) => j).filter((j) => forest.nodes[j].depth === forest.nodes[i].depth).sort((a, b) => y[a] - y[b]);
  const next = { ArrowLeft: forest.nodes[i].parent, ArrowRight: children[i][0], ArrowUp: row[row.indexOf(i) - 1], ArrowDown: row[row.indexOf(i) + 1] }[event.key];
  if (next == null || next < 0) return;
  event.preventDefault();
  const mark = (j) => document.querySelector(`#forest-trees [data-node="${j}"]`);
  mark(i).setAttribute("tabindex", -1);
  mark(next).setAttribute("tabindex", 0);
  mark(next).focus();
}

function openNode(forest, i) {
  const n = forest.nodes[i];
  document.querySelector("#forest-trees .chosen")?.classList.remove("chosen");
  document.querySelector(`#forest-trees [data-node="${i}"]`).classList.add("chosen");
  byId("forest-node").replaceChildren(el("div", { class: "card" },
    el("div", { class: "turn-head" }, el("b", { text: `Turn ${n.depth + 1}` }), el("span", { text: words(n) })),
    ...n.messages.map((m) => message(m, null)),
    ...n.ends.map((e) => el("p", { class: e.error ? "error" : "muted", text: `${e.trajectory} ended here: ${e.status}, ${ending_of(e)}${e.error ? `, ${e.error}` : ""}` }))));
}

// ---- rollouts ------------------------------------------------------------------------------------
const PAGE = 25;
let visible = PAGE;
const signed = (v) => (v > 0 ? "+" : "") + number(v);
const named = (values) => Object.entries(values).map(([name, v]) => `${name} ${signed(v)}`).join(", ");
const kindOf = (row) => (row.status === "trained" || data.evaluation ? row.verdict || row.status : row.status);
const counted = (n, what) => `${whole.format(n)} ${what}${n === 1 ? "" : "s"}`;

function searchable(row) {
  row.searchText ??= [row.task, row.trajectory, row.group, row.reason, row.error, row.stop_reason,
    ...row.turns.flatMap((t) => t.messages).concat(row.last).flatMap((m) => [m.content, m.reasoning, ...(m.tool_calls || []).flat()]),
  ].filter(Boolean).join("\n").toLowerCase();
  return row.searchText;
}

function options(select, all, values) {
  select.append(...(all ? [el("option", { value: "", text: all })] : []), ...values.map(([value, text]) => el("option", { value, text })));
}

function rollouts() {
  const { rows, total, shown, counts } = data.rollouts;
  const parts = ["trained", "dropped", "failed", "eval"].filter((k) => counts[k]).map((k) => `${whole.format(counts[k])} ${k}`);
  const has = (test) => rows.some(test), good = has((r) => r.verdict === "good") ? " Good means a raw reward above the middle of the range seen in its environment." : "";
  const left = has((r) => r.verdict === "failed" && data.evaluation) ? " Failed ones gave no usable result and enter no mean." : "";
  const all = `All ${whole.format(total)} episodes of this evaluation.${good}${left}`;
  byId("sampled").textContent = data.evaluation ? all : total
    ? `Shown here: ${shown} of ${whole.format(total)} rollouts of this run (${parts.join(", ")}): the best and the worst, failed, dropped and held-out ones, of steps spread over the run. All of them are in the rollouts folder. Good means a raw reward above the middle of the range seen in its environment.`
    : "No rollouts were written.";
  byId("filters").hidden = !total;
  options(byId("kind"), "all", [["solved", "solved"], ["unsolved", "unsolved"], ["good", "good"], ["bad", "bad"], ["failed", "failed"], ["dropped", "dropped"], ...(data.evaluation ? [] : [["eval", "held-out (eval)"]])]
    .filter(([k]) => has((r) => r.verdict === k || r.status === k)));
  options(byId("step"), "all", [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b).map((s) => [s, s]));
  options(byId("environment"), "all", [...new Set(rows.map((r) => r.environment))].sort().map((e) => [e, e]));
  byId("filters").addEventListener("input", () => { visible = PAGE; list(); });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("next").addEventListener("click", () => { visible += PAGE; list(); });
  list();
}

function list() {
  const kind = byId("kind").value, step = byId("step").value, environment = byId("environment").value;
  const words = byId("search").value.toLowerCase();
  const found = data.rollouts.rows.filter((row) =>
    (!kind || row.verdict === kind || row.status === kind) && (!step || row.step === Number(step)) &&
    (!environment || row.environment === environment) && (!words || searchable(row).includes(words)));
  byId("found").textContent = data.rollouts.total ? `${found.length} found` : "";
  byId("list").replaceChildren(...found.slice(0, visible).map(item));
  byId("next").hidden = found.length <= visible;
}

function item(row) {
  const kind = kindOf(row);
  const numbers = el("span", { class: "numbers" }, ...(row.failure ? ["no score"] : ["reward ", el("b", { text: number(row.reward_raw) })]),
    row.advantage != null && ` · advantage ${signed(row.advantage)}`, ` · ${counted(row.turn_count, "turn")} · ${counted(row.response_tokens, "token")}`);
  const steps = byId("step").options.length > 2, sample = data.evaluation && data.samples > 1 ? ` · sample ${row.trajectory.split("/").pop()}` : "";
  const node = el("details", { class: "rollout" },
    el("summary", {}, el("span", { class: `chip ${kind}`, text: kind }), el("span", { class: "numbers", text: data.evaluation && !steps ? "" : `step ${row.step}` }),
      el("span", { class: "what", text: `${row.environment} · ${row.task}${sample}` }), numbers));
  node.addEventListener("toggle", () => { if (node.open && node.childElementCount === 1) node.append(dialogue(row)); });
  return node;
}

function dialogue(row) {
  const about = el("dl", { class: "about" });
  const facts = [["stopped", row.stop_reason], ["raw", named(row.rewards)], ["shaped", named(row.shaped)], ["trained on", number(row.reward_shaped)],
    ["group", row.group], ["trajectory", row.trajectory], ["branch of", row.parent], ["reason", row.reason], ["metrics", named(row.metrics)]];
  for (const [label, value] of facts) if (value) about.append(el("div", {}, el("dt", { text: label }), el("dd", { text: value })));
  const body = el("div", { class: "body" }, about, row.error && el("p", { class: "error", text: row.error }));
  const turns = el("div");
  const show = (view) => turns.replaceChildren(...row.turns.map((t, i) => turn(t, i, view)), ...(row.last.length ? [ending(row)] : []));
  if (row.turns.some((t) => t.tokens)) {
    const select = el("select", { onchange: (event) => show(event.target.value) }, el("option", { value: "", text: "dialogue" }),
      el("option", { value: "text", text: "text as the model reads it" }),
      el("option", { value: "logprob", text: "sampled tokens by log-probability" }), el("option", { value: "entropy", text: "sampled tokens by entropy" }));
    body.append(el("label", { class: "views" }, "View ", select, "stronger colour: less likely, or less certain"));
  }
  show("");
  body.append(turns);
  return body;
}

function turn(t, index, view) {
  const head = el("div", { class: "turn-head" }, el("b", { text: `Turn ${index + 1}` }),
    Object.keys(t.rewards).length > 0 && el("span", { text: `raw ${named(t.rewards)}` }),
    Object.keys(t.shaped).length > 0 && el("span", { text: `shaped ${named(t.shaped)}` }),
    t.stop_reason !== "stop_token" && el("span", { text: `ended by ${t.stop_reason.replace("_", " ")}` }),
    index > 0 && t.fresh && el("span", { text: "context rewritten" }));
  if (view === "text") return el("div", { class: "turn" }, head, exact("shown", "user", t.read), exact("sampled", "assistant", t.said));
  const last = t.messages.length - 1;
  const messages = t.messages.map((m, i) => message(m, view && i === last && m.role === "assistant" ? tokens(t.tokens, view) : null));
  return el("div", { class: "turn" }, head, ...messages);
}

/** Tokens as text, with the marks of the chat template and the descriptions of tools. */
function exact(label, role, text) {
  return el("div", { class: `message ${role}` }, el("div", { class: "role", text: label }), el("p", { class: "text", text }));
}

function ending(row) {
  return el("div", { class: "turn" }, el("div", { class: "turn-head" }, el("b", { text: "At the end" })), ...row.last.map((m) => message(m, null)));
}

function message(m, replacement) {
  const node = el("div", { class: `message ${m.role}` }, el("div", { class: "role", text: m.role + (m.name ? ` (${m.name})` : "") }));
  if (replacement) { node.append(replacement); return node; }
  if (m.reasoning) {
    node.append(el("details", { class: "thought", open: true }, el("summary", { text: "thought" }), el("p", { class: "text", text: m.reasoning })));
  }
  if (m.content) node.append(el("p", { class: "text" }, ...boardsIn(m.content).map((part) => (typeof part === "string" ? part : board(part)))));
  for (const [name, args] of m.tool_calls || []) node.append(el("p", { class: "text call" }, el("b", { text: name }), ` ${args}`));
  for (const error of m.errors || []) node.append(el("p", { class: "error", text: error }));
  return node;
}

function board(rows) {
  return el("span", { class: "board" }, ...rows.flatMap((row, i) => [i ? "\n" : "", ...[...row].map((symbol) => el("i", { class: SQUARES[symbol], text: symbol }))]));
}

function tokens(list, view) {
  if (!list) return el("p", { class: "muted", text: "Too many tokens for this page: this turn is left out." });
  const node = el("p", { class: "text" });
  for (const [text, logprob, entropy] of list) {
    const value = view === "entropy" ? (entropy ?? 0) / 3 : -(logprob ?? 0) / 5;
    const title = `log-probability ${number(logprob)} (${percent(Math.exp(logprob))})` + (entropy == null ? "" : `, entropy ${number(entropy)} nats`);
    const span = el("span", { class: "token", title, text: text.replace(/\n/g, "⏎\n") });
    span.style.setProperty("--heat", Math.max(0, Math.min(1, value)).toFixed(3));
    node.append(span);
  }
  return node;
}

// ---- configuration -------------------------------------------------------------------------------
function settings() {
  const isTable = (line) => /^\s*\[/.test(line);
  const given = data.config.filter(([line, origin]) => origin || isTable(line)) // a default has no origin
    .filter(([line], i, all) => !isTable(line) || (i + 1 < all.length && !isTable(all[i + 1][0])));
  const draw = () => byId("settings").replaceChildren(...(byId("hide-defaults").checked ? given : data.config)
    .map(([line, origin]) => el("div", { class: isTable(line) ? "setting table" : "setting" }, el("span", { text: line }), origin && el("span", { class: "soft", text: origin }))));
  byId("defaults").hidden = !data.config.some(([, origin]) => origin);
  byId("hide-defaults").addEventListener("change", draw);
  draw();
  if (!data.config.length) byId("settings").append(el("p", { class: "muted", text: "config.toml is missing." }));
}

results();
lengths();
curves();
forests();
rollouts();
settings();
for (const link of document.querySelectorAll("nav a")) link.hidden = document.querySelector(link.getAttribute("href")).hidden;
