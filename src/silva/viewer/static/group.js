// A step: its groups. A group: the forest of its turns, and its members side by side.
import { html, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact_htm.js";
import { useData } from "./api.js";
import { branch, ends, heat, laidOut, number } from "./figures.js";
import { Chip, Reward, Waiting, link, useChosen } from "./parts.js";
import { Dialogue, Said } from "./rollout.js";

export function StepPage({ given, stamp, go }) {
  const step = Number(given.step), found = useData("groups", { run: given.run, step }, stamp);
  const { steps = [] } = useData("steps", { run: given.run }, stamp).data || {};
  const at = steps.indexOf(step);
  return html`<div class="bar"><h1>Step ${step}</h1>
      <span class="inline">${at > 0 && html`<a class="button" href=${link("step", { run: given.run, step: steps[at - 1] })}>‹ ${steps[at - 1]}</a>`}
      ${at >= 0 && at < steps.length - 1 && html`<a class="button" href=${link("step", { run: given.run, step: steps[at + 1] })}>${steps[at + 1]} ›</a>`}
      <a class="button" href=${link("rollouts", { run: given.run, step })}>its rollouts</a></span></div>
    <${Waiting} found=${found} what="the step …">${(data) => html`<${Groups} rows=${data.rows} given=${given} go=${go} />`}<//>`;
}

function Groups({ rows, given, go }) {
  const to = (row) => link("group", { run: given.run, step: given.step, group: row.group });
  const at = useChosen(rows.length, (i) => go(to(rows[i])));
  if (!rows.length) return html`<p class="empty">No groups: this step has only held-out rollouts.</p>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Groups"><table><thead><tr><th>group</th><th>became</th><th class="num">rollouts</th><th class="num">branches</th><th class="num">reward</th><th class="num">lowest, highest</th><th class="num narrow">entropy</th><th class="num narrow">reply tokens</th></tr></thead>
    <tbody>${rows.map((row, i) => html`<tr key=${row.group} class=${i === at ? "chosen" : ""}>
      <td class="name"><a href=${to(row)}>${row.task}</a> <span class="soft">${row.environment}</span></td>
      <td><${Chip} kind=${row.reason ? "dropped" : row.failed === row.rollouts ? "failed" : row.status} />${row.reason && html` <span class="soft">${row.about || row.reason}</span>`}</td>
      <td class="num">${row.rollouts}${row.failed ? html`<span class="soft"> (${row.failed} failed)</span>` : ""}</td><td class="num">${row.branches || ""}</td>
      <td class="num"><${Reward} value=${row.reward} /></td><td class="num soft">${number(row.low)}, ${number(row.high)}</td>
      <td class="num narrow">${number(row.entropy)}</td><td class="num narrow">${number(Math.round(row.response_tokens))}</td></tr>`)}</tbody></table></div>`;
}

const COLOURED_BY = { reward: "reward", advantage: "advantage", entropy: "entropy", staleness: "versions behind" };

export function GroupPage({ given, go, stamp }) {
  const found = useData("forest", { run: given.run, step: given.step, group: given.group });
  return html`<${Waiting} found=${found} what="the group …">${(data) => html`<${Group} data=${data} given=${given} go=${go} />`}<//>`;
}

function Group({ data, given, go }) {
  const { forest, members } = data, by = given.colour || "reward";
  const place = new Map(members.map((row) => [row.trajectory, row]));
  const [node, choose] = useState(-1);
  const ranked = [...members].filter((row) => !row.failure).sort((a, b) => b.reward - a.reward);
  const [side, compare] = useState(() => [...new Set([ranked[0], ranked[ranked.length - 1]].filter(Boolean).map((row) => row.at))]);
  const mark = (at) => compare(side.includes(at) ? side.filter((each) => each !== at) : [...side, at].slice(-4));
  return html`<div class="bar"><h1>${members[0].task}</h1>
      <label class="inline">Colour <select value=${by} onChange=${(e) => go(link("group", { ...given, colour: e.target.value }))}>${Object.entries(COLOURED_BY).map(([key, words]) => html`<option key=${key} value=${key}>${words}</option>`)}</select></label></div>
    <p class="muted">${members[0].environment}, step ${given.step}: ${members.length} rollouts${forest ? `, ${forest.nodes.length} turns as a forest; what rollouts share is one node` : ""}${forest?.left_out ? `; ${forest.left_out} more rollouts are not drawn` : ""}</p>
    ${forest ? html`<${Forest} nodes=${forest.nodes} by=${by} chosen=${node} choose=${choose} />` : html`<p class="empty">Nothing was played.</p>`}
    ${node >= 0 && forest && html`<${NodeText} node=${forest.nodes[node]} place=${place} run=${given.run} />`}
    <h2>Members</h2>
    <div class="wide" tabindex="0" role="region" aria-label="Members"><table><thead><tr><th><span class="hidden">Side by side</span></th><th>rollout</th><th>became</th><th class="num">reward</th><th class="num">advantage</th><th class="num">turns</th><th class="num narrow">reply tokens</th><th>ended by</th></tr></thead>
      <tbody>${members.map((row) => html`<tr key=${row.at}><td><input type="checkbox" aria-label=${`Side by side: ${row.trajectory}`} checked=${side.includes(row.at)} onChange=${() => mark(row.at)} /></td>
        <td class="name"><a href=${link("rollout", { run: given.run, step: given.step, at: row.at })}>${row.trajectory}</a></td><td><${Chip} kind=${row.status} /></td>
        <td class="num"><${Reward} value=${row.failure ? null : row.reward} /></td><td class="num">${number(row.advantage)}</td><td class="num">${row.turns}</td><td class="num narrow">${number(row.response_tokens)}</td><td class="soft">${row.stop_reason.replace("_", " ")}</td></tr>`)}</tbody></table></div>
    ${!!side.length && html`<h2>Side by side</h2><div class="sides" tabindex="0" role="region" aria-label="Side by side">${side.map((at) => html`<${Side} key=${at} run=${given.run} step=${given.step} at=${at} />`)}</div>`}`;
}

function Side({ run, step, at }) {
  const found = useData("rollout", { run, step, at });
  return html`<section class="card"><${Waiting} found=${found} what="the rollout …">${(data) => html`<h3>${data.trajectory} <${Reward} value=${data.failure ? null : data.reward_raw} /></h3><${Dialogue} data=${data} />`}<//></section>`;
}

function NodeText({ node, place, run }) {
  return html`<section class="card node-text" aria-live="polite"><p class="soft num">turn ${node.depth + 1} · through it: ${node.leaves} · ${node.tokens} tokens sampled · reward ${number(node.reward)} · advantage ${number(node.advantage)} · entropy ${number(node.entropy)}</p>
    ${node.messages.map((message, i) => html`<div key=${i} class="message ${message.role}"><div class="role">${message.role}</div>${message.reasoning && html`<details class="thought"><summary>thought</summary><pre>${message.reasoning}</pre></details>`}<${Said} text=${message.content} /></div>`)}
    ${node.ends.map((end) => html`<p key=${end.trajectory}><a href=${place.has(end.trajectory) ? link("rollout", { run, step: place.get(end.trajectory).step, at: place.get(end.trajectory).at }) : null}>${end.trajectory}</a> ends here: ${end.stop_reason.replace("_", " ")}, reward ${number(end.reward)} ${end.error && html`<span class="error">${end.error}</span>`}</p>`)}</section>`;
}

function Forest({ nodes, by, chosen, choose }) {
  const plan = useMemo(() => laidOut(nodes), [nodes]);
  const [zoom, scale] = useState(plan.lines > 60 ? 0.55 : 1);
  const tall = 26 * zoom, wide = Math.max(34, 110 * Math.min(1, zoom + 0.3)), radius = Math.max(3, 7 * Math.min(1, zoom + 0.25));
  const [low, high] = ends(nodes.map((node) => node[by]), by), labels = tall >= 13;
  const x = (i) => 60 + nodes[i].depth * wide, y = (line) => 16 + line * tall;
  const width = 60 + plan.depth * wide + 130, height = 32 + Math.max(0, plan.lines - 1) * tall;
  const rooted = y(plan.root), box = useRef(null);
  useLayoutEffect(() => { box.current.scrollTop = rooted - box.current.clientHeight / 2; }, [plan, zoom]);
  const move = (event) => {
    const kin = { ArrowLeft: nodes[chosen]?.parent, ArrowRight: nodes.findIndex((node) => node.parent === chosen), ArrowDown: chosen + 1, ArrowUp: chosen - 1 }[event.key];
    if (kin == null) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(nodes.length - 1, kin)));
  };
  return html`<div class="bar small"><span class="legend scale"><span>${number(low)}</span><i class="gradient"></i><span>${number(high)} ${COLOURED_BY[by]}</span></span>
      <label class="inline">Size <input type="range" min="0.25" max="1.4" step="0.05" value=${zoom} onInput=${(e) => scale(Number(e.target.value))} /></label></div>
    <div class="trees" ref=${box} tabindex="0" role="application" aria-label="Forest: arrows go from turn to turn" onKeyDown=${move}>
      <svg width=${width} height=${height} role="img" aria-label=${`A forest of ${nodes.length} turns and ${plan.lines} ends`}>
        ${nodes.map((node, i) => html`<path key=${"e" + i} class="link" d=${node.parent < 0 ? branch(20, rooted, x(i), y(plan.line[i])) : branch(x(node.parent), y(plan.line[node.parent]), x(i), y(plan.line[i]))} stroke-width=${Math.min(6, 0.8 + node.leaves / 4)} />`)}
        <rect class="task" x="12" y=${rooted - 8} width="16" height="16" rx="4" />
        ${nodes.map((node, i) => html`<g key=${i}>
          <circle class="node ${node.ends.length ? "leaf" : ""} ${node.ends.some((end) => end.error) ? "failed" : ""} ${i === chosen ? "chosen" : ""}" onClick=${() => choose(i)} cx=${x(i)} cy=${y(plan.line[i])} r=${radius} style=${{ fill: heat(node[by], low, high) }}><title>${`turn ${node.depth + 1}: ${COLOURED_BY[by]} ${number(node[by])}, ${node.leaves} rollouts`}</title></circle>
          ${labels && !!node.ends.length && html`<text x=${x(i) + radius + 6} y=${y(plan.line[i]) + 4}>${number(node.ends[0].reward)}${node.ends.length > 1 ? ` ×${node.ends.length}` : ""}</text>`}</g>`)}
      </svg></div>`;
}
