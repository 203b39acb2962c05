// What miniwob_browser.py says to a page of MiniWoB. It runs before the page's own scripts.
//
// A page has a clock of its own, which stands still until `advance` moves it, and random numbers of a seed, so
// that neither the speed of the machine nor that of a model changes what happens.

window.silva = (() => {
  const start = Date.UTC(2020, 5, 15, 9), timers = new Map(), Clock = Date;
  const frame = window.requestAnimationFrame.bind(window);
  let now = start, next = 1, state = 1;

  window.Date = new Proxy(Clock, {
    construct: (target, args, made) => Reflect.construct(target, args.length ? args : [now], made),
    apply: () => new Clock(now).toString(),
    get: (target, key) => key === 'now' ? () => now : Reflect.get(target, key),
  });
  performance.now = () => now - start;
  Math.random = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;  // while it loads
  const add = (run, ms, args, repeats) => {
    const wait = Math.max(1, ms || 0);
    timers.set(next, {at: now + wait, every: repeats && wait, run, args});
    return next++;
  };
  window.setTimeout = (run, ms, ...args) => add(run, ms, args, false);
  window.setInterval = (run, ms, ...args) => add(run, ms, args, true);
  window.requestAnimationFrame = run => add(() => run(now - start), 16, [], false);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = id => timers.delete(id);
  window.open = window.alert = window.confirm = window.prompt = () => null;

  // Nothing leads away from the page, and styles change at once: their clock is the machine's.
  window.addEventListener('submit', event => event.preventDefault(), true);
  window.addEventListener('click', event => {
    const link = event.target.closest('a[href]');
    if (link && !link.getAttribute('href').startsWith('#')) event.preventDefault();
  }, true);
  document.addEventListener('DOMContentLoaded', () => document.head.insertAdjacentHTML('beforeend',
    '<style>* {transition: none !important; animation: none !important}</style>'));

  const advance = ms => {
    for (const end = now + ms;;) {
      let due = null;
      for (const [id, timer] of timers)
        if (timer.at <= end && (due === null || timer.at < timers.get(due).at)) due = id;
      if (due === null) { now = end; return; }
      const timer = timers.get(due);
      now = timer.at;
      if (timer.every) timer.at += timer.every; else timers.delete(due);
      try {
        if (typeof timer.run === 'function') timer.run(...timer.args); else (0, eval)(timer.run);
      } catch (error) { console.error(error); }  // as in a browser: the page goes on
    }
  };
  // Two frames, so that events that wait for one (scroll) have come.
  const settle = () => new Promise(done => frame(() => frame(done)));

  const found = ref => core.previousDOMInfo[ref];  // elements, as of the last getDOMInfo()
  const changed = element => {
    for (const name of ['input', 'change']) element.dispatchEvent(new Event(name, {bubbles: true}));
  };
  const kindOf = element => {
    if (element instanceof HTMLSelectElement) return 'select';
    if (element instanceof HTMLTextAreaElement || element.isContentEditable) return 'field';
    if (!(element instanceof HTMLInputElement)) return '';
    if (/^(date|time|month|week|datetime-local|color|range)$/.test(element.type)) return 'value';
    return /^(text|password|search|email|tel|url|number)$/.test(element.type) ? 'field' : '';
  };
  const DRAWN = ['fill', 'x', 'y', 'cx', 'cy', 'r', 'width', 'height', 'points', 'd', 'font-size'];

  function line(node, element, options) {
    const classes = typeof node.classes === 'string' ? node.classes.split(/\s+/).filter(Boolean) : [];
    const more = {};
    if (options) {
      more.value = [...element.selectedOptions].map(option => option.text.trim()).join(', ');
      more.options = options.join(', ');
    } else if (node.value !== undefined) more.value = node.value;
    if (element.placeholder) more.placeholder = element.placeholder;
    if (element instanceof SVGElement)
      for (const key of DRAWN) if (element.getAttribute(key)) more[key] = element.getAttribute(key);
    if (!node.text && !node.children.length && element.style.backgroundColor)
      more.color = element.style.backgroundColor;
    return [
      `[${node.ref}]`, [node.tag.toLowerCase() + (node.id && '#' + node.id), ...classes].join('.'),
      ...(node.text && !('value' in more) ? [JSON.stringify(node.text)] : []),
      ...Object.entries(more).map(([key, value]) => `${key}=${JSON.stringify(value)}`),
      ...(element.disabled ? ['disabled'] : []), ...(node.focused ? ['focused'] : []),
    ].join(' ');
  }

  function read() {
    const view = {asked: '', text: '', kinds: {}, options: {}, done: WOB_DONE_GLOBAL, reward: +WOB_RAW_REWARD_GLOBAL};
    if (view.done) return view;
    const lines = [];
    const walk = (node, depth) => {
      const element = found(node.ref), pad = '  '.repeat(depth);
      if (!element) { lines.push(pad + JSON.stringify(node.text)); return; }  // text between elements
      const outer = node.id === 'wrap' || node.id === 'area', kind = kindOf(element);
      if (kind === 'select') view.options[node.ref] = [...element.options].map(option => option.text.trim());
      if (!outer) {
        view.kinds[node.ref] = kind;
        lines.push(pad + line(node, element, view.options[node.ref]));
      }
      if (kind !== 'select') node.children.forEach(child => walk(child, depth + !outer));
    };
    core.getDOMInfo().children.forEach(child => walk(child, 0));
    return {...view, asked: core.getUtterance(), text: lines.join('\n')};
  }

  return {
    ready: () => typeof core !== 'undefined' && document.readyState === 'complete' && !!core.cover_div,
    begin(seed, mode) {
      advance(1000);
      core.EPISODE_MAX_TIME = 1e12;  // milliseconds: an episode ends by its number of actions
      core.setDataMode(mode);
      Math.seedrandom(seed);
      core.startEpisodeReal();
    },
    async advance(ms) {
      if (!WOB_DONE_GLOBAL) advance(ms);
      await settle();
    },
    read,
    place(ref) {  // the middle of an element; null if something else is above it
      const element = found(ref);
      element.scrollIntoView({block: 'nearest', inline: 'nearest', behavior: 'instant'});
      const box = element.getClientRects()[0] || element.getBoundingClientRect();
      const x = box.left + box.width / 2, y = box.top + box.height / 2;
      return element.contains(document.elementFromPoint(x, y)) ? {x, y} : null;
    },
    click: ref => { core.elementClick(ref); },
    fill(ref, text) { found(ref).value = text; changed(found(ref)); },
    select(ref, text) {
      const element = found(ref), option = [...element.options].find(each => each.text.trim() === text);
      option.selected = !(element.multiple && option.selected);
      changed(element);
    },
    scroll(ref, where) { found(ref).scrollTop += (where === 'up' ? -1 : 1) * found(ref).clientHeight; },
    mark(ref) {
      if (found(ref).select) found(ref).select(); else getSelection().selectAllChildren(found(ref));
    },
    marked() {
      const element = document.activeElement;
      return element && element.selectionEnd
        ? element.value.slice(element.selectionStart, element.selectionEnd) : getSelection().toString();
    },
  };
})();
