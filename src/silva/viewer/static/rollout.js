// A rollout: its dialogue with an outline, its tokens with their numbers, and the same task in other steps.
import { html, useEffect, useRef, useState } from "./vendor/preact_htm.js";
import { held, useData } from "./api.js";
import { boardsIn, number, scaled, SQUARES } from "./figures.js";
import { behind, Chip, Reward, Waiting, link } from "./parts.js";

export function RolloutPage({ given, stamp, go }) {
  const { run, step, at, view = "text" } = given;
  const found = useData("rollout", { run, step, at });
  const to = (changes) => link("rollout", { run, step, at, view, ...changes });
  return html`<${Waiting} found=${found} what="the rollout …">${(data) => html`
    <div class="bar"><h1>${data.task}</h1><${Chip} kind=${data.status} /></div>
    <dl class="facts small"><div><dt>step</dt><dd>${data.step}</dd></div><div><dt>reward</dt><dd><${Reward} value=${data.failure ? null : data.reward_raw} /></dd></div>
      <div><dt>with shaping</dt><dd>${number(data.reward_shaped)}</dd></div><div><dt>advantage</dt><dd>${number(data.advantage)}</dd></div>
      <div><dt>turns</dt><dd>${data.turn_count}</dd></div><div><dt>tokens of replies</dt><dd>${number(data.response_tokens)}</dd></div>
      <div><dt>ended</dt><dd>${data.stop_reason.replace("_", " ")}</dd></div>${data.staleness > 0 && html`<div><dt>sampled</dt><dd>${behind(data.staleness)}</dd></div>`}<div><dt>rollout</dt><dd class="mono">${data.trajectory}</dd></div>
      ${Object.entries(data.rewards).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${number(value)}</dd></div>`)}</dl>
    ${(data.about || data.reason || data.error) && html`<p class="notice">${[data.reason, data.about].filter(Boolean).join("; ")}${data.error && html`<span class="error"> ${data.error}</span>`}</p>`}
    <nav class="tabs" aria-label="Views"><a aria-current=${view === "text" ? "page" : null} href=${to({ view: "" })}>Dialogue</a><a aria-current=${view === "tokens" ? "page" : null} href=${to({ view: "tokens" })}>Tokens</a>
      ${data.group && html`<a href=${link("group", { run, step: data.step, group: data.group })}>Its group</a>`}
      ${held("rollouts", rolloutsOf(run, data.task)) && html`<a href=${link("task", { run, task: data.task })}>This task in other steps</a>`}</nav>
    ${view === "tokens" ? html`<${Tokens} given=${given} turns=${data.turns.length} to=${to} go=${go} />` : html`<div class="with-outline"><${Outline} data=${data} /><div><${Dialogue} data=${data} /></div></div>`}
  `}<//>`;
}

function Outline({ data }) {
  const first = (turn) => { const last = turn.messages[turn.messages.length - 1]; return last ? last.content || last.tool_calls?.[0]?.[0] || last.reasoning || "" : ""; };
  const jump = (i) => document.getElementById(`turn-${data.at}-${i}`)?.scrollIntoView({ block: "start" });
  return html`<details class="outline" open=${innerWidth > 900}><summary>Outline</summary><ol>${data.turns.map((turn, i) => html`<li key=${i}><button type="button" class="plain" onClick=${() => jump(i)}>
    <span class="what">${first(turn).slice(0, 60) || "(nothing)"}</span>${Object.values(turn.rewards).map((value, k) => html`<${Reward} key=${k} value=${value} />`)}</button></li>`)}</ol></details>`;
}

export function Dialogue({ data }) {
  return html`${data.turns.map((turn, i) => html`<section key=${i} class="turn" id=${`turn-${data.at}-${i}`}>
      <p class="turn-head"><b>Turn ${i + 1}</b>${turn.fresh && i > 0 ? html`<span>context rewritten</span>` : ""}${turn.stop_reason !== "stop_token" ? html`<span>ended by ${turn.stop_reason.replace("_", " ")}</span>` : ""}
        ${Object.entries(turn.rewards).map(([name, value]) => html`<span key=${name}>${name} <${Reward} value=${value} /></span>`)}
        ${Object.entries(turn.shaped).map(([name, value]) => html`<span key=${"s" + name}>${name} (shaped) ${number(value)}</span>`)}</p>
      ${turn.messages.map((message, k) => html`<${Message} key=${k} message=${message} />`)}</section>`)}
    ${!!data.last.length && html`<section class="turn"><p class="turn-head"><b>At the end</b></p>${data.last.map((message, k) => html`<${Message} key=${k} message=${message} />`)}</section>`}`;
}

function Message({ message }) {
  return html`<div class="message ${message.role}"><div class="role">${message.role}${message.name ? ` · ${message.name}` : ""}</div>
    ${message.reasoning && html`<details class="thought" open><summary>thought</summary><pre>${message.reasoning}</pre></details>`}
    ${message.content && html`<${Said} text=${message.content} />`}
    ${(message.tool_calls || []).map(([name, text], i) => html`<pre key=${i} class="call"><b>${name}</b> ${text}</pre>`)}
    ${(message.errors || []).map((text, i) => html`<p key=${i} class="error">${text}</p>`)}</div>`;
}

/** A text with its boards drawn. */
export function Said({ text }) {
  const board = (rows, k) => html`<span key=${k} class="board">${rows.map((row, i) => html`${i ? "\n" : ""}${[...row].map((symbol) => html`<i class=${SQUARES[symbol]}>${symbol}</i>`)}`)}</span>`;
  return html`<pre>${boardsIn(text).map((part, k) => (typeof part === "string" ? part : board(part, k)))}</pre>`;
}

const SCALES = {
  logprobs: "log-probability sampled with", entropies: "entropy", raw_logprobs: "log-probability of the model", trainer_logprobs: "log-probability of the trainer",
  ratios: "ratio of trainer to sampler", advantages: "advantage", weights: "weight in the loss", versions: "version of the policy", clipped: "clipped by the loss",
};
const WORDS = { clipped: ["not clipped by the loss", "clipped by the loss"] }; // of values that are no measure
const LOW_IS_HOT = ["logprobs", "raw_logprobs", "trainer_logprobs"];

function Tokens({ given, turns, to, go }) {
  const turn = Number(given.turn || 0), by = given.by || "logprobs";
  const found = useData("tokens", { run: given.run, step: given.step, at: given.at, turn });
  return html`<div class="bar small"><label class="inline">Turn <select value=${turn} onChange=${(e) => go(to({ view: "tokens", turn: e.target.value, by }))}>${Array.from({ length: turns }, (_, i) => html`<option key=${i} value=${i}>${i + 1} of ${turns}</option>`)}</select></label>
      <${Waiting} found=${found} what="tokens …">${(data) => html`<${TokenText} data=${data} by=${by} scale=${(key) => go(to({ view: "tokens", turn, by: key }))} />`}<//></div>`;
}

function TokenText({ data, by, scale }) {
  const all = data.segments.flatMap((segment) => segment[by] || []).filter((value) => value != null);
  const words = WORDS[by], low = words ? 0 : all.reduce((a, b) => Math.min(a, b), Infinity), high = words ? 1 : all.reduce((a, b) => Math.max(a, b), -Infinity);
  const end = (value) => (!all.length ? "–" : words ? words[value] : number(value));
  const [at, choose] = useState(null);
  const known = Object.keys(SCALES).filter((key) => data.segments.some((segment) => segment[key]?.length));
  const places = data.segments.flatMap((segment, s) => segment.tokens.map((_, t) => [s, t]));
  const hover = (event) => { const place = event.target.dataset?.at; if (place) choose(place.split(":").map(Number)); };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const now = at ? places.findIndex(([s, t]) => s === at[0] && t === at[1]) : -1;
    choose(places[Math.max(0, Math.min(places.length - 1, now + by))]);
  };
  const hot = (value) => { const share = scaled(value, low, high); return share == null ? null : { "--heat": (LOW_IS_HOT.includes(by) ? 1 - share : share).toFixed(3) }; };
  return html`<label class="inline">Colour <select value=${by} onChange=${(e) => scale(e.target.value)}>${known.map((key) => html`<option key=${key} value=${key}>${SCALES[key]}</option>`)}</select></label>
    <span class="legend scale"><span>${end(LOW_IS_HOT.includes(by) ? high : low)}</span><i class="gradient"></i><span>${end(LOW_IS_HOT.includes(by) ? low : high)}</span></span>
    <div class="full">${!data.text && html`<p class="muted">The tokenizer of this run is not on this machine: tokens are shown by number.</p>`}
    ${!known.length && html`<p class="muted">No token of this turn was sampled here.</p>`}
    <p class="token-facts num" role="status">${at ? facts(data, at) : "Point at a token, or press the arrow keys in the text."}</p>
    <div class="tokens" tabindex="0" role="application" aria-label="Tokens: arrow keys go from one to the next" onPointerOver=${hover} onKeyDown=${move}>
      ${data.segments.map((segment, s) => html`<span key=${s} class="segment ${segment.source}">${segment.tokens.map((text, t) => html`<span key=${t} data-at=${`${s}:${t}`} class="token ${at && at[0] === s && at[1] === t ? "chosen" : ""}" style=${hot(segment[by]?.[t])}>${text}</span>`)}</span>`)}
    </div></div>`;
}

function facts(data, [s, t]) {
  const segment = data.segments[s];
  if (!segment) return "";
  const parts = [JSON.stringify(segment.tokens[t]), `id ${segment.ids[t]}`, { environment: "read, no loss", policy: "sampled", expert: "of an expert" }[segment.source]];
  for (const [key, words] of Object.entries(SCALES)) if (segment[key]?.length && segment[key][t] != null) parts.push(WORDS[key] ? WORDS[key][segment[key][t]] : `${words} ${number(segment[key][t])}`);
  if (segment.streams?.[t]) parts.push(`stream ${segment.streams[t]}`);
  return parts.join(" · ");
}

/** The question for all rollouts of a task. */
const rolloutsOf = (run, task) => ({ run, filter: `task == ${JSON.stringify(task)}`, sort: "step", limit: 500 });

export function TaskPage({ given, stamp, go }) {
  const { run, task } = given;
  const found = useData("rollouts", rolloutsOf(run, task), stamp);
  return html`<div class="bar"><h1>${task}</h1></div><p class="muted">The same task in the steps of the run: choose two to compare word by word.</p>
    <${Waiting} found=${found} what="rollouts of the task …">${(data) => html`<${Versions} rows=${data.rows} given=${given} go=${go} />`}<//>`;
}

function Versions({ rows, given, go }) {
  if (!rows.length) return html`<p class="empty">No rollout has this task.</p>`;
  const name = (row) => `${row.step}:${row.at}`;
  const a = given.a || name(rows[0]), b = given.b || name(rows[rows.length - 1]);
  const found = useData("texts", { run: given.run, a, b });
  const pair = (side, row) => ({ run: given.run, a, b, [side]: name(row) });
  const pick = (side, row) => go(link("task", { ...pair(side, row), task: given.task }));
  return html`<div class="short" tabindex="0" role="region" aria-label="Rollouts of the task"><table><thead><tr><th>A</th><th>B</th><th class="num">step</th><th>became</th><th class="num">reward</th><th class="num">turns</th><th>rollout</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${name(row)}>${["a", "b"].map((side) => html`<td key=${side}><input type="radio" name=${side} disabled=${!held("texts", pair(side, row))} aria-label=${`${side === "a" ? "First" : "Second"}: step ${row.step}, ${row.trajectory}`} checked=${(side === "a" ? a : b) === name(row)} onChange=${() => pick(side, row)} /></td>`)}
      <td class="num">${row.step}</td><td><${Chip} kind=${row.status} /></td><td class="num"><${Reward} value=${row.failure ? null : row.reward} /></td><td class="num">${row.turns}</td>
      <td class="name"><a href=${held("rollout", { run: given.run, step: row.step, at: row.at }) ? link("rollout", { run: given.run, step: row.step, at: row.at }) : null}>${row.trajectory}</a></td></tr>`)}</tbody></table></div>
    <h2>Difference</h2><${Waiting} found=${found} what="both …">${(data) => html`<div class="card"><p class="soft">A: step ${data.a.step}, reward ${number(data.a.reward)} · B: step ${data.b.step}, reward ${number(data.b.reward)} · <del>only in A</del> <ins>only in B</ins></p>
      <pre class="diff">${data.parts.map((part, i) => (part.kind === "equal" ? part.a : html`<span key=${i}>${part.a && html`<del>${part.a}</del>`}${part.b && html`<ins>${part.b}</ins>`}</span>`))}</pre></div>`}<//>`;
}
