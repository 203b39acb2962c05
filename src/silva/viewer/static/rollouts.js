// The list of rollouts: filter, order, as many as there are. And what was dropped, failed, cut or stale, by kind.
import { html, useEffect, useRef, useState } from "./vendor/preact_htm.js";
import { ask, exported, filters, held, useData } from "./api.js";
import { number } from "./figures.js";
import { behind, Chip, Reward, VirtualRows, Waiting, link, useChosen } from "./parts.js";

const SORTS = { "-step": "newest", step: "oldest", "-reward": "highest reward", reward: "lowest reward", "-advantage": "highest advantage", "-response_tokens": "most reply tokens", "-tool_calls": "most tool calls", "-turns": "most turns", "-entropy": "highest entropy" };
const EXAMPLES = ['reward < 0.3 and tool_calls > 2 and "timeout" in text', "status == \"dropped\" and reason != \"zero_variance\"", "truncated or failed", "branch and advantage > 0", "rewards.success == 1 and turns <= 3"];

export function RolloutsPage({ given, stamp, go }) {
  const { run, filter = "", sort = "-step", step = "" } = given;
  const [text, type] = useState(filter);
  useEffect(() => type(filter), [filter]);
  const to = (changes) => {
    const next = { run, filter, sort, step, ...changes };
    go(link("rollouts", { ...next, sort: next.sort === "-step" ? "" : next.sort }));
  };
  return html`
    <div class="bar"><h1>Rollouts</h1></div>
    <form class="bar small" onSubmit=${(e) => { e.preventDefault(); to({ filter: e.target.elements.filter.value.trim() }); }}>
      ${filters(run) && html`<label class="grow">Filter <input class="mono" type="search" id="filter" spellcheck="false" autocomplete="off" placeholder='reward < 0.3 and "timeout" in text' value=${text} onInput=${(e) => type(e.target.value)} /></label>
      <button type="submit">Apply</button>
      <label>Order <select value=${sort} onChange=${(e) => to({ sort: e.target.value })}>${Object.entries(SORTS).map(([key, words]) => html`<option key=${key} value=${key}>${words}</option>`)}</select></label>`}
      ${step && html`<a class="button" href=${link("rollouts", { run, filter, sort })}>step ${step} ×</a>`}
    </form>
    ${!filters(run) && html`<p class="muted">These are the first rollouts of the run, or of the step. In an export, filters and other orders take runs of up to ${number(exported().most)} rollouts; <code>silva view</code> takes any.</p>`}
    ${filters(run) && html`<${Help} run=${run} use=${(example) => to({ filter: example })} />`}
    <${List} key=${[run, filter, sort, step].join("\n")} asked=${{ run, filter, sort: sort === "-step" ? "" : sort, step }} stamp=${stamp} go=${go} />`;
}

function Help({ run, use }) {
  const found = useData(exported() ? "all" : "columns", exported() ? { run } : {});
  return html`<details class="help"><summary>What a filter can say</summary>
    <p>Comparisons with <code>${"< <= > >= == !="}</code>, <code>"text" in column</code>, <code>column in (1, 2)</code>, <code>is none</code>, joined by <code>and</code>, <code>or</code>, <code>not</code>. A comparison with a missing value is false.</p>
    <p>${found.data && Object.entries(found.data.columns).map(([name, kind]) => html`<code key=${name} title=${kind}>${name}</code> `)}
    ${found.data && Object.keys(found.data.named).map((name) => html`<code key=${name}>${name}.NAME</code> `)}</p>
    ${found.data && !found.data.columns.text && html`<p>What was said (<code>text</code>) is too long for this export; <code>silva view</code> looks through it.</p>`}
    <p>${EXAMPLES.map((example) => html`<button type="button" key=${example} class="plain mono" onClick=${() => use(example)}>${example}</button>`)}</p></details>`;
}

function List({ asked, stamp, go }) {
  const [rows, set] = useState([]);
  const [state, tell] = useState({ next: null, done: false, error: "", about: {} });
  const busy = useRef(false), begun = useRef(stamp), alive = useRef(true);
  // to count reads as much again; if nothing follows, all are here
  const count = useData(state.next ? "count" : null, { run: asked.run, filter: asked.filter, step: asked.step }, stamp);
  const more = async () => {
    if (busy.current || state.done || state.error) return;
    busy.current = true;
    try {
      const page = await ask("rollouts", { ...asked, after: state.next ? JSON.stringify(state.next) : "" });
      if (!alive.current) return;
      set((before) => [...before, ...page.rows]);
      tell((before) => ({ next: page.next, done: !page.next || !!exported(), error: "", about: { ...before.about, ...page.about } }));
    } catch (error) {
      tell((before) => ({ ...before, error: error.message }));
    } finally {
      busy.current = false;
    }
  };
  useEffect(() => {
    more();
    return () => { alive.current = false; };
  }, []);
  const open = (row) => (held("rollout", { run: asked.run, step: row.step, at: row.at }) ? link("rollout", { run: asked.run, step: row.step, at: row.at }) : null);
  const at = useChosen(rows.length, (i) => open(rows[i]) && go(open(rows[i])));
  begun.current ??= stamp; // known only when the list of runs has come
  const again = () => { begun.current = stamp; set([]); tell({ next: null, done: false, error: "", about: {} }); };
  return html`
    <p class="muted" role="status">${state.error ? html`<span class="error" role="alert">${state.error}</span>` : !rows.length && !state.done ? "Looking …" : !filters(asked.run) ? `${number(rows.length)} shown` : state.next ? (count.data ? `${number(count.data.count)} rollouts fit, mean reward ${number(count.data.reward)}` : `${number(rows.length)} shown, counting …`) : `${number(rows.length)} rollouts fit, mean reward ${number(meanOf(rows))}`}
      ${exported() && filters(asked.run) && `; the dialogues of ${number(rows.filter(open).length)} of them are in this export`}
      ${stamp !== begun.current && html` <button type="button" class="plain" onClick=${again}>The run has gone on: read again</button>`}</p>
    ${!!rows.length && html`<div class="list-head" aria-hidden="true"><span>state</span><span class="num">step</span><span>task</span><span class="num">reward</span><span class="num wideonly">advantage</span><span class="num wideonly">turns</span><span class="num wideonly">calls</span><span class="num wideonly">reply tokens</span><span class="wideonly">ended by</span></div>
    <${VirtualRows} count=${rows.length} height=${38} label="Rollouts" selected=${at} more=${more} row=${(i) => html`<a key=${i} class="list-row ${i === at ? "chosen" : ""}" href=${open(rows[i])}><${Row} row=${rows[i]} about=${state.about} /></a>`} />`}
    ${!rows.length && state.done && html`<p class="empty">No rollout fits.</p>`}`;
}

function meanOf(rows) {
  const known = rows.filter((row) => !row.failure).map((row) => row.reward);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function Row({ row, about }) {
  const why = row.status === "failed" ? row.error : row.status === "dropped" ? about[row.reason] || row.reason : behind(row.staleness);
  return html`<span><${Chip} kind=${row.status} /></span><span class="num">${row.step}</span>
    <span class="what">${row.task}${why ? html` <span class="soft">· ${why}</span>` : ""}</span>
    <span class="num"><${Reward} value=${row.failure ? null : row.reward} /></span>
    <span class="num wideonly">${number(row.advantage)}</span><span class="num wideonly">${row.turns}</span>
    <span class="num wideonly">${number(row.tool_calls)}</span><span class="num wideonly">${number(row.response_tokens)}</span>
    <span class="soft wideonly">${row.stop_reason.replace("_", " ")}</span>`;
}

/** The filter that finds the rollouts of a kind: of an error, by what stands before its first number. */
export function filterOf({ what, kind, works }) {
  if (what === "dropped") return `status == "dropped" and reason == ${JSON.stringify(kind)}`;
  if (what === "cut") return `stop_reason == ${JSON.stringify(kind)}`;
  if (works) return `work in (${works.map((work) => JSON.stringify(work)).join(", ")})`;
  if (what === "stale") return `staleness == ${parseInt(kind)} and status == "trained" and not truncated`;
  const start = kind.split("#")[0].trim();
  return start ? `failed and ${JSON.stringify(start)} in error` : "failed";
}

export function OutcomesPage({ given, stamp, go }) {
  const found = useData("outcomes", { run: given.run }, stamp);
  return html`<div class="bar"><h1>Dropped, failed, cut or stale</h1></div>
    <p class="muted">By kind; a rollout counts once, as the first of these. Messages of a kind differ only in numbers.</p>
    <${Waiting} found=${found} what="all rollouts …">${(data) => html`<${Kinds} rows=${data.rows} run=${given.run} go=${go} />`}<//>`;
}

function Kinds({ rows, run, go }) {
  const at = useChosen(rows.length, (i) => go(link("rollouts", { run, filter: filterOf(rows[i]) })));
  if (!rows.length) return html`<p class="empty">Nothing was dropped, failed, cut or stale.</p>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Kinds"><table><thead><tr><th>what</th><th>kind</th><th class="num">rollouts</th><th class="num">steps</th><th>latest</th></tr></thead>
    <tbody>${rows.map((row, i) => html`<tr key=${row.what + row.kind} class=${i === at ? "chosen" : ""}><td><${Chip} kind=${row.what} text=${row.what} /></td>
      <td class="reason">${!filters(run) ? row.kind : html`<a href=${link("rollouts", { run, filter: filterOf(row) })}>${row.kind}</a>`}${row.about && html`<div class="soft">${row.about}</div>`}</td>
      <td class="num">${number(row.count)}${row.works && (row.count === 1 ? " restart" : " restarts")}</td><td class="num">${row.first === row.step ? row.step : `${row.first} to ${row.step}`}</td>
      <td>${row.at != null && html`<a href=${link("rollout", { run, step: row.step, at: row.at })}>open</a>`}</td></tr>`)}</tbody></table></div>`;
}
