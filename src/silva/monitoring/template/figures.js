// What all pages show alike: numbers, what became of a result, smoothed curves, the places of a forest. The
// report and comparisons hold this text as a part of their script, the viewer imports it.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Three digits that count, or all of a whole number. */
export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size >= 1000) return size >= 1e7 ? value.toExponential(2) : whole.format(value);
  if (Number.isInteger(value)) return String(value);
  return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

export const isShare = (metric) => /success|accuracy|(pass|maj|avg)@/.test(metric);
export const percent = (value) => (value == null ? "–" : (100 * value).toFixed(1) + " %");

function duration(s) {
  s = Math.round(s);
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

/** A fact about a run; `kind` says what its value is. */
export function fact(value, kind) {
  if (kind === "seconds") return duration(value);
  if (kind === "bytes") return (value / 2 ** 30).toFixed(2) + " GiB";
  return kind === "count" ? whole.format(value) : String(value);
}

export const VERDICTS = { better: "better", "maybe-better": "higher, within the intervals", "maybe-worse": "lower, within the intervals", worse: "worse", "": "" };

/** What became of a result where more is better, a key of VERDICTS: clear only if the intervals do not overlap. */
export function judged(first, last) {
  if (!first || !(isShare(last.metric) || last.metric === "reward") || first.mean == null || last.mean == null || first.mean === last.mean) return "";
  const end = (result, key) => result[key] ?? result.mean;
  if (last.mean > first.mean) return end(last, "ci_low") > end(first, "ci_high") ? "better" : "maybe-better";
  return end(last, "ci_high") < end(first, "ci_low") ? "worse" : "maybe-worse";
}

/** Exponential moving average without the bias of its start. */
export function smooth(values, by) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = by * mean + (1 - by) * value;
    weight = by * weight + (1 - by);
    return weight ? mean / weight : value;
  });
}

/** Places of the nodes of a forest: a column for each turn, a line for each leaf, parents in the middle of their children. */
export function laidOut(nodes) {
  const children = nodes.map(() => []), roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  const line = new Array(nodes.length).fill(0);
  let next = 0;
  const order = [], waiting = [...roots].reverse();
  while (waiting.length) {
    const i = waiting.pop();
    order.push(i);
    waiting.push(...[...children[i]].reverse());
  }
  for (const i of order) if (!children[i].length) line[i] = next++;
  for (const i of order.reverse()) if (children[i].length) line[i] = (line[children[i][0]] + line[children[i][children[i].length - 1]]) / 2;
  const root = roots.length ? (line[roots[0]] + line[roots[roots.length - 1]]) / 2 : 0;
  return { line, children, root, lines: next, depth: Math.max(0, ...nodes.map((node) => node.depth)) };
}

/** An edge of a forest, from a place to another. */
export const branch = (fromX, fromY, toX, toY) => `M${fromX} ${fromY}C${(fromX + toX) / 2} ${fromY} ${(fromX + toX) / 2} ${toY} ${toX} ${toY}`;

/** The ends of a scale for some values; of advantages, 0 is its middle. */
export function ends(values, by) {
  const known = values.filter((value) => value != null), low = Math.min(...known), high = Math.max(...known);
  const most = Math.max(-low, high);
  return !known.length ? [null, null] : by === "advantage" ? [-most, most] : [low, high];
}

/** Where a value stands between the ends of a scale, from 0 to 1. */
export function scaled(value, low, high) {
  if (value == null || Number.isNaN(value)) return null;
  return high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0.5;
}

/** The colour of a value between the ends of a scale. */
export function heat(value, low, high) {
  const share = scaled(value, low, high);
  return share == null ? "var(--card)" : `color-mix(in oklab, var(--cold), var(--hot) ${Math.round(100 * share)}%)`;
}

/** What a square of a board is drawn as, by its symbol: those of sokoban and frozen_lake. */
export const SQUARES = { "#": "wall", _: "floor", O: "place", X: "box", P: "player", S: "player", G: "reached", "√": "reached" };
const MOST_SQUARES = 4000;

/** A text in parts: strings, and boards as arrays of rows. A board is lines of one length, of symbols only, with somebody on it. */
export function boardsIn(text) {
  const lines = text.split("\n"), parts = [];
  let left = MOST_SQUARES;
  for (let i = 0, end; i < lines.length; i = end) {
    for (end = i; /^[#_OXPSG√]{2,}$/.test(lines[end]) && lines[end].length === lines[i].length; ) end++;
    const rows = lines.slice(i, end), size = rows.length * lines[i].length;
    if (rows.length > 1 && /[PSX√]/.test(rows.join("")) && size <= left) {
      parts.push(rows);
      left -= size;
      continue;
    }
    end = Math.max(end, i + 1);
    const said = lines.slice(i, end).join("\n");
    if (typeof parts.at(-1) === "string") parts.push(`${parts.pop()}\n${said}`);
    else parts.push(said);
  }
  return parts;
}
