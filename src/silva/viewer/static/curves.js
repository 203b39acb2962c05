// Curves: drawn by uPlot, smoothed here, with bands for intervals. A drag zooms, two clicks go back, one opens a step.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact_htm.js";
import { number, smooth } from "./figures.js";

const COLOURS = 8;
const TWICE = 300; // milliseconds in which a second click may come
/** Lines of several runs in one chart: its first, second, ... metric. */
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

/** One list of charts of several runs: series of the same chart and name side by side. */
export function merged(parts) {
  const found = new Map();
  for (const { name, charts, colour } of parts) for (const chart of charts) {
    if (!found.has(chart.title)) found.set(chart.title, { title: chart.title, more: chart.more, series: [] });
    for (const series of chart.series) {
      const several = chart.series.length > 1 || parts.length === 1;
      const { series: all } = found.get(chart.title), same = all.find((each) => each.name === series.name);
      const dash = parts.length === 1 ? 0 : same ? same.dash : new Set(all.map((each) => each.name)).size;
      all.push({ ...series, label: parts.length === 1 ? series.name : several ? `${name} · ${series.name}` : name, colour: parts.length === 1 ? null : colour, dash, run: name });
    }
  }
  return [...found.values()];
}

export function Curves({ charts, open }) {
  const [by, smoothBy] = useState(0.6);
  const [word, search] = useState("");
  const fits = (chart) => !word || chart.title.toLowerCase().includes(word.toLowerCase());
  const main = charts.filter((chart) => (word ? fits(chart) : !chart.more)), rest = charts.filter((chart) => chart.more);
  const [all, showAll] = useState(false);
  return html`
    <div class="bar small">
      <label class="inline">Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${by} onInput=${(e) => smoothBy(Number(e.target.value))} /> <span class="num">${by.toFixed(2)}</span></label>
      <input type="search" class="grow" placeholder="Name of a metric" aria-label="Search metrics" value=${word} onInput=${(e) => search(e.target.value)} />
      <span class="muted hint">drag: zoom · two clicks: back${open ? " · click: open the step" : ""}</span>
    </div>
    <div class="charts">${main.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} by=${by} open=${open} />`)}</div>
    ${!main.length && html`<p class="empty">${word ? "No metric has that name." : "No metrics so far."}</p>`}
    ${!word && !!rest.length && html`<p><button type="button" onClick=${() => showAll(!all)} aria-expanded=${all}>${all ? "Hide" : "Show"} ${rest.length} other metrics</button></p>`}
    ${!word && all && html`<div class="charts">${rest.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} by=${by} open=${open} />`)}</div>`}`;
}

function Chart({ chart, by, open }) {
  const box = useRef(null), plot = useRef(null), zoomed = useRef(null), opening = useRef(null);
  useEffect(() => () => clearTimeout(opening.current), []);
  const table = useMemo(() => tableOf(chart, by), [chart, by]);
  const series = chart.series;
  useEffect(() => {
    const colour = (i, alpha = 1) => resolved(`--s${(series[i].colour ?? i) % COLOURS}`, alpha);
    const soft = resolved("--soft"), line = resolved("--line");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 44, values: (_, values) => values.map(number) };
    const options = {
      width: box.current.clientWidth, height: 190, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 26, grid: { show: false } }, axis],
      series: [{}, ...table.kinds.map(({ of, kind }) => ({
        stroke: kind === "raw" ? colour(of, 0.3) : kind === "line" ? colour(of) : "transparent",
        width: kind === "line" ? 2 : 1, dash: kind === "line" ? dashes(series[of]) : [], points: { show: kind === "line" && series[of].x.length < 30, size: 5 }, spanGaps: true,
      }))],
      bands: table.bands.map(([high, low, of]) => ({ series: [high, low], fill: colour(of, 0.18) })),
      hooks: { setCursor: [(u) => tell(u.cursor.idx)], setScale: [(u, key) => { if (key === "x") zoomed.current = zoomOf(u); }] },
    };
    plot.current = new uPlot(options, table.data, box.current);
    if (zoomed.current) plot.current.setScale("x", zoomed.current); // new values do not undo it
    let down = null;
    const over = plot.current.over;
    over.addEventListener("mousedown", (event) => { down = event.clientX; });
    over.addEventListener("click", (event) => {
      clearTimeout(opening.current);
      if (!open || event.detail > 1 || down == null || Math.abs(event.clientX - down) >= 4) return;
      const i = plot.current.posToIdx(event.clientX - over.getBoundingClientRect().left);
      opening.current = setTimeout(() => open(table.data[0][i]), TWICE);
    });
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: 190 }));
    observer.observe(box.current);
    return () => { observer.disconnect(); plot.current.destroy(); };
  }, [table, document.documentElement.dataset.theme]);
  const [at, tell] = useState(null);
  const step = at == null ? null : table.data[0][at];
  return html`<figure class="card chart">
    <figcaption><h3>${chart.title}</h3><span class="soft num">${step == null ? "" : `step ${step}`}</span></figcaption>
    <div class="legend">${series.map((each, i) => html`<span key=${i}>${each.dash ? html`<svg class="swatch line" aria-hidden="true"><line y1="4.5" y2="4.5" x2="22" stroke="var(--s${each.colour % COLOURS})" stroke-width="2" stroke-dasharray=${dashes(each).join(" ")} /></svg>` : html`<i class="swatch s${(each.colour ?? i) % COLOURS}"></i>`}${each.label ?? each.name} <b>${number(valueAt(each, step))}</b></span>`)}</div>
    <div class="plot" ref=${box} role="img" aria-label=${describe(chart)}></div>
  </figure>`;
}

/** The steps that a zoom shows; null if these are all. */
function zoomOf({ scales: { x: { min, max } }, data: [steps] }) {
  return min > steps[0] || max < steps.at(-1) ? { min, max } : null;
}

const dashes = (series) => DASHES[(series.dash ?? 0) % DASHES.length];

/** The colour of a variable as canvas takes it. */
function resolved(name, alpha = 1) {
  const probe = document.createElement("i");
  probe.style.color = `color-mix(in srgb, var(${name}) ${100 * alpha}%, transparent)`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

function valueAt(series, step) {
  const i = step == null ? series.y.length - 1 : series.x.indexOf(step);
  return i < 0 ? null : series.y[i];
}

function describe(chart) {
  const last = (s) => s.y[s.y.length - 1];
  return `${chart.title}: ` + chart.series.map((s) => `${s.label ?? s.name} from ${number(s.y[0])} at step ${s.x[0]} to ${number(last(s))} at step ${s.x[s.x.length - 1]}`).join("; ");
}

/** Columns for uPlot: the steps of all series, then of each its line, its values as they are, and its bounds. */
function tableOf(chart, by) {
  const steps = [...new Set(chart.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const data = [steps], kinds = [], bands = [];
  const add = (of, kind, values) => {
    const column = new Array(steps.length).fill(null);
    chart.series[of].x.forEach((step, i) => { column[place.get(step)] = values[i] ?? null; });
    data.push(column);
    kinds.push({ of, kind });
    return data.length - 1;
  };
  chart.series.forEach((series, of) => {
    const smoothed = by > 0 && series.x.length > 2 && !series.low;
    if (smoothed) add(of, "raw", series.y);
    add(of, "line", smoothed ? smooth(series.y, by) : series.y);
    if (series.low) bands.push([add(of, "high", series.high), add(of, "low", series.low), of]);
  });
  return { data, kinds, bands };
}
