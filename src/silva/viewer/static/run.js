// One run: its results, warnings, curves and configuration; and several runs side by side.
import { html, useMemo, useState } from "./vendor/preact_htm.js";
import { useData } from "./api.js";
import { Curves, merged } from "./curves.js";
import { fact, isShare, judged, number, percent, VERDICTS } from "./figures.js";
import { Chip, Waiting, link } from "./parts.js";
import { familyOf } from "./runs.js";

const shown = (metric, value) => (isShare(metric) ? percent : number)(value);

export function RunPage({ given, found: all, stamp, go }) {
  const now = all.data?.runs.find((run) => run.run === given.run)?.waiting;  // newer than the page
  const found = useData("run", { run: given.run }, stamp);
  return html`<${Waiting} found=${found} what="the run …">${(data) => html`
    <div class="bar"><h1>${data.name} <${Chip} kind=${data.status.state} /></h1></div>
    ${now && html`<p class="muted">Now: ${now}</p>`}
    ${data.problems.map((text) => html`<p class="notice" key=${text}>${text}</p>`)}
    <div class="cards">${data.headline.after.map((last) => html`<${Result} key=${last.environment + last.metric} last=${last} before=${data.headline.before} />`)}</div>
    <dl class="facts">${data.headline.facts.map(([label, value, kind]) => html`<div key=${label}><dt>${label}</dt><dd>${fact(value, kind)}</dd></div>`)}</dl>
    ${!!data.warnings.length && html`<details class="warnings"><summary>${data.warnings.length} ${data.warnings.length === 1 ? "warning" : "warnings"}</summary>
      <ul>${data.warnings.map(([level, text, count], i) => html`<li key=${i} class=${level}>${text}${count > 1 ? ` (${count} of this kind)` : ""}</li>`)}</ul></details>`}
    <${OneRunCurves} name=${data.name} charts=${data.charts} open=${data.steps.length ? (step) => go(link("step", { run: given.run, step })) : null} />
  `}<//>`;
}

function OneRunCurves({ name, charts, open }) {
  const all = useMemo(() => merged([{ name, charts }]), [charts]);
  return html`<h2>Curves</h2><${Curves} charts=${all} open=${open} />`;
}

function Result({ last, before }) {
  const first = before.find((each) => each.environment === last.environment && each.metric === last.metric);
  const range = (each) => (each.ci_low == null ? "" : `${shown(last.metric, each.ci_low)} to ${shown(last.metric, each.ci_high)}`);
  const verdict = judged(first, last);
  return html`<article class="card result ${verdict}"><h3>${last.environment}, held-out ${last.metric}</h3>
    <p class="big">${first && html`<span class="before">${shown(last.metric, first.mean)} → </span>`}<span class="after">${shown(last.metric, last.mean)}</span> <span class="verdict">${VERDICTS[verdict]}</span></p>
    <p class="soft num">${range(last) && `95 %: ${range(last)}`}${last.left_out ? ` · ${last.left_out} episodes left out` : ""}</p></article>`;
}

export function ConfigPage({ given, stamp }) {
  const found = useData("run", { run: given.run }, stamp);
  const [set, only] = useState(true);
  return html`<${Waiting} found=${found} what="the configuration …">${(data) => {
    const origins = data.config.some(([, origin]) => origin), table = (line) => line.startsWith("[");
    const kept = data.config.filter(([line, origin], i) => !set || !origins || origin || (table(line) && anySet(data.config, i)));
    return html`<div class="bar"><h1>Configuration</h1>
      ${origins && html`<label class="inline"><input type="checkbox" checked=${set} onChange=${() => only(!set)} /> only what was set</label>`}</div>
      <div class="card settings">${kept.map(([line, origin], i) => html`<div key=${i} class=${table(line) ? "setting table" : "setting"}><span>${line || "\u00a0"}</span><span class="soft">${origin}</span></div>`)}</div>
      ${!data.config.length && html`<p class="empty">config.toml is missing.</p>`}`;
  }}<//>`;
}

function anySet(config, at) {
  for (let i = at + 1; i < config.length && !config[i][0].startsWith("["); i++) if (config[i][1]) return true;
  return false;
}

export function ComparePage({ given, stamp, go }) {
  const names = [given.run].flat(), mean = given.mean === "1";
  const families = [...new Set(names.map(familyOf))];
  const seeds = families.length === 1 && families[0] && names.length > 1;
  return html`<div class="bar"><h1>${names.length} runs side by side</h1>
      ${seeds && html`<span class="inline"><a class="button" href=${link("compare", { run: names, mean: mean ? "" : 1 })}>${mean ? "Show each seed" : "Show the mean with its 95 % interval"}</a></span>`}</div>
    ${mean ? html`<${MeanCurves} names=${names} stamp=${stamp} />` : html`<${SideBySide} key=${names.join()} names=${names} stamp=${stamp} />`}
    <${Differences} key=${names.join()} names=${names} />`;
}

function MeanCurves({ names, stamp }) {
  const found = useData("curves", { run: names }, stamp);
  return html`<${Waiting} found=${found} what="the curves …">${(data) => html`<${OneRunCurves} name=${familyOf(names[0])} charts=${data.charts} />`}<//>`;
}

function SideBySide({ names, stamp }) {
  const parts = names.slice(0, 8).map((name) => useData("curves", { run: name }, stamp));
  const ready = parts.map((part, i) => part.data && { name: names[i], charts: part.data.charts, colour: i }).filter(Boolean);
  const failed = parts.find((part) => part.error);
  const charts = useMemo(() => merged(ready), parts.map((part) => part.data));
  return html`${failed && html`<p class="notice" role="alert">${failed.error}</p>`}
    <p class="legend">${names.slice(0, 8).map((name, i) => html`<span key=${name}><i class="swatch s${i}"></i><a href=${link("run", { run: name })}>${name}</a></span>`)}</p>
    ${names.length > 8 && html`<p class="muted">The first 8 of ${names.length} are drawn.</p>`}
    <${Curves} charts=${charts} />`;
}

function Differences({ names }) {
  const [second, choose] = useState(1);
  const found = useData(names.length > 1 ? "diff" : null, { a: names[0], b: names[second] });
  return html`<div class="bar"><h2>Difference of configurations</h2>
    <label class="inline">${names[0]} and <select value=${second} onChange=${(e) => choose(Number(e.target.value))}>${names.slice(1).map((name, i) => html`<option key=${name} value=${i + 1}>${name}</option>`)}</select></label></div>
    <${Waiting} found=${found} what="both configurations …">${(data) => (data.rows.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Differences"><table>
      <thead><tr><th>key</th><th>${names[0]}</th><th>${names[second]}</th></tr></thead>
      <tbody>${data.rows.map((row) => html`<tr key=${row.path}><td class="mono">${row.path}</td>
        <td><span class="mono">${row.origin_a ? JSON.stringify(row.a) : "not set"}</span> <span class="soft">${row.origin_a}</span></td>
        <td><span class="mono">${row.origin_b ? JSON.stringify(row.b) : "not set"}</span> <span class="soft">${row.origin_b}</span></td></tr>`)}</tbody></table></div>`
      : html`<p class="empty">Both have the same configuration.</p>`)}<//>`;
}
