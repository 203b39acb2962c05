// What all pages are made of. What a model wrote is only ever a text node: nothing here sets markup.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact_htm.js";
import { number } from "./figures.js";

export function ago(seconds) {
  if (seconds == null) return "";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (past >= size) return `${Math.floor(past / size)} ${unit} ago`;
  return "just now";
}

/** An address of a page: its name, and what it shows. */
export function link(page, given) {
  const pairs = Object.entries(given || {}).flatMap(([key, value]) => (Array.isArray(value) ? value : [value]).map((each) => [key, each]));
  const shown = pairs.filter(([, value]) => value !== "" && value != null).map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
  return `#/${page}${shown.length ? "?" + shown.join("&") : ""}`;
}

export const STATES = { trained: "trained", dropped: "dropped", failed: "failed", eval: "held-out" };

/** How old what was trained is, in words. */
export const behind = (staleness) => (staleness > 0 ? `${staleness} ${staleness === 1 ? "version" : "versions"} behind` : "");

export function Chip({ kind, text }) {
  return html`<span class="chip ${kind}">${text ?? STATES[kind] ?? kind}</span>`;
}

export function Waiting({ found, what, children }) {
  if (found.error) return html`<p class="notice" role="alert">${found.error}</p>`;
  if (found.loading || !found.data) return html`<p class="muted" role="status">Reading ${what || "…"}</p>`;
  return children(found.data);
}

export function Reward({ value }) {
  const kind = value == null ? "" : value > 0 ? "plus" : value < 0 ? "minus" : "";
  return html`<span class="value ${kind}">${number(value)}</span>`;
}

/** Rows of one height, of which only those in sight are in the page. `more` is called near the end. */
export function VirtualRows({ count, height, row, more, label, selected }) {
  const box = useRef(null);
  const [sight, look] = useState({ top: 0, size: 900 });
  const measure = () => box.current && look({ top: box.current.scrollTop, size: box.current.clientHeight });
  useLayoutEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (selected < 0 || !box.current) return;
    const top = selected * height, { scrollTop, clientHeight } = box.current;
    if (top < scrollTop) box.current.scrollTop = top;
    else if (top + height > scrollTop + clientHeight) box.current.scrollTop = top + height - clientHeight;
  }, [selected]);
  const first = Math.max(0, Math.floor(sight.top / height) - 8);
  const last = Math.min(count, Math.ceil((sight.top + sight.size) / height) + 8);
  useEffect(() => {
    if (last >= count - 20) more?.();
  }, [last, count]);
  const shown = [];
  for (let i = first; i < last; i++) shown.push(row(i));
  return html`<div class="scroll" ref=${box} onScroll=${measure} tabindex="0" role="region" aria-label=${label}>
    <div class="tall" style=${{ height: `${count * height}px` }}>
      <div class="rows" style=${{ transform: `translateY(${first * height}px)` }}>${shown}</div>
    </div>
  </div>`;
}

/** Which row the keys j and k have chosen; Enter follows `open(i)`. */
export function useChosen(count, open) {
  const [at, choose] = useState(-1);
  const state = useRef({});
  state.current = { at, count, open };
  useEffect(() => {
    const pressed = (event) => {
      if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      const { at, count, open } = state.current;
      if (event.key === "j") choose(Math.min(count - 1, at + 1));
      else if (event.key === "k") choose(Math.max(0, at - 1));
      else if (event.key === "Enter" && at >= 0 && at < count && !event.target.closest("a, button, summary")) open(at);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  return at;
}

export const typing = (event) => event.target.closest && event.target.closest("input, select, textarea");
