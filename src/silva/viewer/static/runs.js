// The list of runs: how each stands, what it does now, and which to look at side by side.
import { html, useState } from "./vendor/preact_htm.js";
import { number } from "./figures.js";
import { Chip, Waiting, ago, link, useChosen } from "./parts.js";

/** "runs/a/seed_3" -> "runs/a"; "" for a run that is no seed of several. */
export const familyOf = (name) => /^(.*)\/seed_\d+$/.exec(name)?.[1] || "";

export function RunsPage({ found, go }) {
  return html`<${Waiting} found=${found} what="the folders …">${(data) => html`<${RunList} runs=${data.runs} go=${go} />`}<//>`;
}

function RunList({ runs, go }) {
  const [word, search] = useState("");
  const [ticked, tick] = useState([]);
  const shown = runs.filter((run) => run.run.toLowerCase().includes(word.toLowerCase()));
  const at = useChosen(shown.length, (i) => go(link("run", { run: shown[i].run })));
  const families = [...new Set(shown.map((run) => familyOf(run.run)).filter(Boolean))];
  const mark = (name) => tick(ticked.includes(name) ? ticked.filter((each) => each !== name) : [...ticked, name]);
  return html`
    <div class="bar">
      <h1>Runs <span class="count">${shown.length}</span></h1>
      <input type="search" class="grow" placeholder="Name" aria-label="Search by name" value=${word} onInput=${(e) => search(e.target.value)} />
      <a class="button ${ticked.length < 2 ? "off" : ""}" aria-disabled=${ticked.length < 2} href=${ticked.length < 2 ? null : link("compare", { run: ticked })}>
        Compare ${ticked.length || ""}</a>
    </div>
    ${families.map((family) => html`<p class="muted" key=${family}>
      <a href=${link("compare", { run: runs.map((run) => run.run).filter((name) => familyOf(name) === family), mean: 1 })}>${family}: the mean over its seeds</a></p>`)}
    ${!shown.length && html`<p class="empty">No runs here yet. A run appears as soon as it has written something.</p>`}
    ${!!shown.length && html`<div class="wide" tabindex="0" role="region" aria-label="Runs"><table>
      <thead><tr><th><span class="hidden">Compare</span></th><th>run</th><th>state</th><th class="num">step</th><th class="num narrow">files of rollouts</th>
        <th class="num narrow">checkpoints</th><th class="narrow">last written</th><th>now</th></tr></thead>
      <tbody>${shown.map((run, i) => html`<tr key=${run.run} class=${i === at ? "chosen" : ""}>
        <td><input type="checkbox" aria-label=${`Compare ${run.run}`} checked=${ticked.includes(run.run)} onChange=${() => mark(run.run)} /></td>
        <td class="name"><a href=${link("run", { run: run.run })}>${run.run}</a></td>
        <td><${Chip} kind=${run.state} /></td>
        <td class="num">${number(run.step)}${run.steps ? html`<span class="soft"> of ${number(run.steps)}</span>` : ""}</td>
        <td class="num narrow">${number(run.rollouts)}</td><td class="num narrow">${number(run.checkpoints)}</td>
        <td class="soft narrow">${ago(run.changed)}</td>
        <td class="soft now">${run.waiting || (run.warnings ? `${run.warnings} ${run.warnings === 1 ? "warning" : "warnings"}` : "")}</td>
      </tr>`)}</tbody></table></div>`}`;
}
