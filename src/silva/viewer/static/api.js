// Where data comes from: the server, or the files of an export. Everything is plain JSON.
import { useEffect, useRef, useState } from "./vendor/preact_htm.js";
import { chosenOf } from "./filter.js";

/** The same text for the same question, which names it in an export. */
export function keyOf(name, parameters) {
  const pairs = Object.entries(parameters || {}).flatMap(([key, value]) => (Array.isArray(value) ? value : [value]).map((each) => [key, each]));
  const given = pairs.filter(([, value]) => value !== "" && value != null).map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(value)}`);
  return given.length ? `${name}?${given.sort().join("&")}` : name;
}

export const exported = () => globalThis.silvaExport || null;

/** Whether a page can be shown: an export holds some of them. */
export const held = (name, parameters) => !exported() || exported().files[keyOf(name, parameters)] != null;

/** Whether the rollouts of a run can be filtered: an export has all rows of runs that are not too long. */
export const filters = (run) => held("all", { run });

export async function ask(name, parameters) {
  const key = keyOf(name, parameters);
  if (exported() && name === "rollouts" && !held(name, parameters) && filters(parameters.run)) return chosenOf(await ask("all", { run: parameters.run }), parameters);
  if (exported()) return fromDisk(key);
  const answer = await fetch(`api/${key}`, { cache: "no-cache" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ? found.error.message : `the server answered ${answer.status}`);
  return found;
}

const waiting = new Map(), read = new Map();
globalThis.silvaData = (key, value) => waiting.get(key)?.(value);

function fromDisk(key) {
  if (!read.has(key)) read.set(key, reading(key));
  return read.get(key);
}

function reading(key) {
  const file = exported().files[key];
  if (file == null) return Promise.reject(new Error("This export does not hold that page. `silva view` shows everything."));
  return new Promise((done, failed) => {
    waiting.set(key, (value) => (value.error ? failed(new Error(value.error)) : done(value)));
    const script = document.createElement("script");
    script.src = `data/${file}.js`;
    script.onerror = () => failed(new Error(`data/${file}.js is missing`));
    document.head.append(script);
  });
}

/** `{data, error, loading}` of a question; asked again when it, or `stamp`, changes. */
export function useData(name, parameters, stamp) {
  const key = name && keyOf(name, parameters);
  const [found, set] = useState({ key: null });
  const current = useRef(key);
  current.current = key;
  useEffect(() => {
    if (!key) return;
    ask(name, parameters).then(
      (data) => current.current === key && set({ key, data }),
      (error) => current.current === key && set({ key, error: error.message }),
    );
  }, [key, stamp]);
  const mine = found.key === key;
  return { data: mine ? found.data : undefined, error: mine ? found.error : undefined, loading: !!key && !mine };
}
