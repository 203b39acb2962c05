// The language of filters over rows that are here, for exports: that of viewer/expression.py, where the grammar stands, and one set of tests holds both.
const FILTER_WORDS = ["and", "or", "not", "in", "is", "none", "true", "false"];
const FILTER_TOKEN = /\s*(?:(?<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?<text>"(?:[^"\\]|\\[^])*"|'(?:[^'\\]|\\[^])*')|(?<op><=|>=|==|!=|<|>)|(?<mark>[(),])|(?<name>[A-Za-z_][A-Za-z_0-9]*(?:\.[A-Za-z_][A-Za-z_0-9]*)?))/y;
const COMPARED = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "==": (a, b) => a === b, "!=": (a, b) => a !== b };
const MOST_CHARACTERS = 2000, DEEPEST = 40;

/** The answer of the page `rollouts`, from all rows of a run. */
export function chosenOf({ rows, about, columns, named, by_step }, { filter, sort, step }) {
  const fits = condition(filter || "", columns, named);  // of an evaluation all rows are one step's
  const found = rows.filter((row) => (!step || !by_step || row.step === Number(step)) && fits(row));
  return { rows: found.sort(inOrder(sort || "-step")), next: null, about };
}

function inOrder(sort) {
  const column = sort.replace("-", ""), sign = sort.startsWith("-") ? -1 : 1;
  return (a, b) => {
    const [x, y] = [a[column], b[column]];
    const first = x == null || y == null ? (x == null) - (y == null) : sign * (x - y);
    return first || a.step - b.step || a.at - b.at;
  };
}

/** What a filter says: a function of a row. An Error tells at which character it is wrong. */
export function condition(text, columns, named) {
  if (text.length > MOST_CHARACTERS) throw new Error(`filter: got ${text.length} characters, expected at most ${MOST_CHARACTERS}`);
  if (!text.trim()) return () => true;
  const tokens = tokensOf(text);
  let place = 0, depth = 0;
  const now = () => tokens[place];
  const expected = (words) => wrongAt(now().at, `got ${now().kind === "end" ? "the end" : now().text}, expected ${words}`);
  const take = (...texts) => ["word", "mark", "op"].includes(now().kind) && texts.includes(now().text) && !!++place;

  const several = (word, part, join) => {
    const parts = [part()];
    while (take(word)) parts.push(part());
    return parts.length === 1 ? parts[0] : join(parts);
  };
  const any = () => several("or", all, (parts) => (row) => parts.some((part) => part(row)));
  const all = () => several("and", one, (parts) => (row) => parts.every((part) => part(row)));
  const not = (part) => (row) => !part(row);

  function one() {
    if (++depth > DEEPEST) expected(`at most ${DEEPEST} parentheses and nots in one another`);
    let found;
    if (take("not")) found = not(one());
    else if (take("(")) {
      found = any();
      if (!take(")")) expected(")");
    } else found = test();
    depth--;
    return found;
  }

  function test() {
    const start = now(), left = operand();
    if (now().kind === "op") return comparisons(left);
    if (take("is")) {
      const known = take("not");
      if (!take("none")) expected("none");
      return (row) => (left.of(row) != null) === known;
    }
    if (take("not")) return take("in") ? not(among(left)) : expected("in");
    if (take("in")) return among(left);
    if (left.kind !== "flag") wrongAt(start.at, `got a ${left.kind} (${start.text}) alone, expected a comparison`);
    return (row) => left.of(row) === true;
  }

  function comparisons(left) {
    const parts = [];
    while (now().kind === "op") {
      const op = tokens[place++], at = now(), a = left, b = operand();
      if (a.kind !== b.kind) wrongAt(at.at, `got a ${b.kind} (${at.text}), expected a ${a.kind}`);
      if (a.kind === "flag" && !["==", "!="].includes(op.text)) wrongAt(op.at, `got ${op.text}, expected == or !=`);
      parts.push((row) => a.of(row) != null && b.of(row) != null && COMPARED[op.text](a.of(row), b.of(row)));
      left = b;
    }
    return (row) => parts.every((part) => part(row));
  }

  function among(left) {
    const start = now();
    if (take("(")) {
      const known = [];
      do {
        const at = now(), each = operand();
        if (each.kind !== left.kind) wrongAt(at.at, `got a ${each.kind}, expected a ${left.kind}`);
        known.push(each);
      } while (take(","));
      if (!take(")")) expected(", or )");
      return (row) => left.of(row) != null && known.some((each) => each.of(row) === left.of(row));
    }
    const whole = operand();
    if (left.kind !== "text" || whole.kind !== "text") wrongAt(start.at, `got ${start.text}, expected a list such as (1, 2), or for a text a text`);
    return (row) => left.of(row) != null && whole.of(row) != null && whole.of(row).includes(left.of(row));
  }

  function operand() {
    const { kind, text: said, at } = now();
    if (kind === "number") return place++, { kind, of: () => Number(said) };
    if (kind === "text") return place++, { kind, of: () => unquoted(said) };
    if (kind === "word" && (said === "true" || said === "false")) return place++, { kind: "flag", of: () => said === "true" };
    if (kind !== "name") expected("a column, a number or a text in quotes");
    const [name, key] = said.split(".");
    place++;
    if (key ? !Object.hasOwn(named, name) : !Object.hasOwn(columns, name)) wrongAt(at, `no column ${said}, expected one of ${[...Object.keys(columns), ...Object.keys(named).map((each) => `${each}.NAME`)].join(", ")}`);
    return key ? { kind: named[name], of: (row) => (Object.hasOwn(row[name] ?? {}, key) ? row[name][key] : null) } : { kind: columns[name], of: (row) => row[name] };
  }

  const found = any();
  if (now().kind !== "end") expected("and, or, or the end");
  return found;
}

function tokensOf(text) {
  const found = [], end = text.trimEnd().length;
  for (let at = 0; at < end; at = FILTER_TOKEN.lastIndex) {
    FILTER_TOKEN.lastIndex = at;
    const match = FILTER_TOKEN.exec(text), start = at + text.slice(at).search(/\S/), place = [...text.slice(0, start)].length + 1;
    if (!match) {
      const shown = [...text.slice(start)].slice(0, 12).join("");
      wrongAt(place, `got '${shown}'${/^["']/.test(shown) ? ": a text that is not closed" : ""}, expected a column, a number, a text in quotes, or one of < <= > >= == != ( )`);
    }
    const [kind, said] = Object.entries(match.groups).find(([, value]) => value != null), word = said.toLowerCase();
    found.push(kind === "name" && FILTER_WORDS.includes(word) ? { kind: "word", text: word, at: place } : { kind, text: said, at: place });
  }
  return [...found, { kind: "end", text: "", at: [...text].length + 1 }];
}

const unquoted = (text) => text.slice(1, -1).replace(/\\([^])/g, (_, char) => ({ n: "\n", t: "\t" })[char] ?? char);

function wrongAt(at, words) {
  throw new Error(`filter: at character ${at}: ${words}`);
}
