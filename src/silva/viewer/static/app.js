// The frame of all pages: the address after # says which page, keys work everywhere, runs are followed live.
import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact_htm.js";
import { ask, exported, useData } from "./api.js";
import { GroupPage, StepPage } from "./group.js";
import { link, typing } from "./parts.js";
import { RolloutPage, TaskPage } from "./rollout.js";
import { OutcomesPage, RolloutsPage } from "./rollouts.js";
import { ComparePage, ConfigPage, RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const EVERY = 2000; // milliseconds between two looks at what is new
const PLACES = { runs: RunsPage, run: RunPage, config: ConfigPage, compare: ComparePage, rollouts: RolloutsPage, outcomes: OutcomesPage, step: StepPage, group: GroupPage, rollout: RolloutPage, task: TaskPage };
const TABS = { run: "Curves", step: "Steps", rollouts: "Rollouts", outcomes: "Outcomes", config: "Configuration" };
const KEYS = [["j, k", "next, previous row"], ["Enter", "open the row"], ["Esc", "one level up"], ["/", "go to the filter or search"], ["← →", "turn by turn in a forest, token by token in a text"], ["d", "dark or light"], ["?", "these keys"]];

function placeOf(hash) {
  const [name, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const given = {};
  for (const [key, value] of new URLSearchParams(query)) given[key] = key in given ? [given[key], value].flat() : value;
  return { name: name in PLACES ? name : "runs", given };
}

function above({ name, given }) {
  if (name === "rollout") return given.step != null ? link("step", { run: given.run, step: given.step }) : link("rollouts", { run: given.run });
  if (name === "group") return link("step", { run: given.run, step: given.step });
  return name === "run" || name === "compare" || name === "runs" ? link("runs") : link("run", { run: given.run });
}

function useRuns() {
  const [found, set] = useState({ loading: true });
  useEffect(() => {
    let ended = false, last = "";
    const look = async () => {
      try {
        const data = await ask("runs"), text = JSON.stringify(data);
        if (!ended && text !== last) set({ data });
        last = text;
      } catch (error) {
        if (!ended) set((before) => ({ data: before.data, error: before.data ? undefined : error.message, lost: true }));
        last = "";
      }
      if (!ended && !exported()) setTimeout(() => (document.hidden ? addEventListener("visibilitychange", look, { once: true }) : look()), EVERY);
    };
    look();
    return () => { ended = true; };
  }, []);
  return found;
}

function App() {
  const [place, set] = useState(placeOf(location.hash)), [help, showHelp] = useState(false), [dark, darken] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  const found = useRuns();
  const go = (address) => { location.hash = address; };
  useEffect(() => {
    const changed = () => { set(placeOf(location.hash)); scrollTo(0, 0); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  document.documentElement.dataset.theme = dark ? "dark" : "light"; // before the pages are drawn, which read colours
  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)"), changed = (event) => darken(event.matches);
    scheme.addEventListener("change", changed);
    return () => scheme.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    const pressed = (event) => {
      if (event.key === "Escape") return typing(event) ? event.target.blur() : help ? showHelp(false) : go(above(placeOf(location.hash)));  // which may be newer than the page
      if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "?") showHelp((was) => !was);
      else if (event.key === "d") darken((was) => !was);
      else if (event.key === "/") { event.preventDefault(); document.querySelector("main input[type=search]")?.focus(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  const { name, given } = place, named = [given.run].flat(), [run] = named, Page = PLACES[name];
  const known = named.map((each) => found.data?.runs.find((other) => other.run === each)).filter(Boolean);
  const stamp = known.map((each) => each.stamp).join(" ") || undefined;  // changes with any of them
  useEffect(() => { document.title = `${run ? `${run} · ` : ""}Silva`; }, [run]);
  return html`<a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the page</a>
    <header><a class="brand" href=${link("runs")}>Silva</a>
      ${run && name !== "compare" && html`<nav aria-label="The run"><a class="crumb" href=${link("run", { run })}>${run}</a>${Object.entries(TABS).map(([key, words]) => html`<${Tab} key=${key} page=${key} words=${words} run=${run} name=${name} given=${given} stamp=${stamp} />`)}</nav>`}
      <span class="grow"></span>${found.lost && html`<span class="error" role="status">no answer from the server</span>`}
      ${known.some((each) => each.state === "running") && html`<span class="live" role="status">live</span>`}
      <button type="button" class="plain" onClick=${() => darken(!dark)} aria-label=${dark ? "Light colours" : "Dark colours"}>${dark ? "☀" : "☾"}</button>
      <button type="button" class="plain" onClick=${() => showHelp(!help)} aria-label="Keys" aria-expanded=${help}>?</button></header>
    ${help && html`<section class="card keys" aria-label="Keys"><dl>${KEYS.map(([key, words]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`)}</dl></section>`}
    <main id="main" tabindex="-1"><${Safe} key=${name + (run || "")}><${Page} given=${given} go=${go} found=${found} stamp=${stamp} /><//></main>`;
}

function Tab({ page, words, run, name, given, stamp }) {
  const inside = { group: "step", rollout: "rollouts", task: "rollouts" }[name] || name;
  const steps = useData(page === "step" ? "steps" : null, { run }, stamp);
  const step = given.step ?? steps.data?.steps.at(-1);
  if (page === "step" && step == null) return null;
  return html`<a href=${link(page, { run, step: page === "step" ? step : "" })} aria-current=${inside === page ? "page" : null}>${words}</a>`;
}

/** An error of a page is shown in its place. */
function Safe({ children }) {
  const [error] = useErrorBoundary();
  return error ? html`<p class="notice" role="alert">This page failed: ${String(error.message || error)}</p>` : children;
}

render(html`<${App} />`, document.getElementById("app"));
