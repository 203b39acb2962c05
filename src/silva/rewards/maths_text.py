r"""One way to write what has many: tables of symbols and of dress, for answers and references alike.

    2π, √2, x², ½        2\pi , \sqrt{2}, x^{2}, \frac{1}{2}
    10\,000, 1~000       10000, 1000              $x = 5$, \mathbf{5}, {5}   x = 5, 5, 5
    $5, 5€, 90°          5\text{dollar}, ...      sqrt(2), 1e3, x^12         \sqrt{2}, 1\times 10^{3}, x^{12}

Words stand in \text{...} after that, and nothing else does. Pure functions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from silva.rewards.maths_words import SHORT_WORDS, UNITS
from silva.rewards.text import STYLES, unframed

_ONES = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    "eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
)
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_VALUES = {word: value for value, word in enumerate(_ONES.split("|"))}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split("|"), 2)}
_GROUPS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UP_TO_99 = rf"(?:(?:{_TENS})(?:[- ](?:{_ONES}))?|(?:{_ONES}))"
_UP_TO_999 = rf"{_UP_TO_99}(?:[- ]hundred(?:[- ](?:and )?{_UP_TO_99})?)?"
_GROUP = rf"[- ](?:{'|'.join(_GROUPS)})(?:,? (?:and )?{_UP_TO_999})?"
_SPELLED = rf"(?i)\b{_UP_TO_999}(?:{_GROUP})*(?![a-z])(?:-(?=[a-z]{{3}}))?"
_GREEK = {
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda"},
    **{"μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "φ": "phi", "ω": "omega", "Δ": "Delta", "Σ": "Sigma"},
}
_MATHS = {
    **{"×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne"},
    **{"⩽": "le", "⩾": "ge", "≈": "approx", "∪": "cup", "∩": "cap", "∈": "in", "±": "pm", "∓": "mp"},
    **{"∅": "emptyset", "∠": "angle", "√": "root", "∛": "cuberoot", "≡": "equiv", "→": "to", "ℝ": "real"},
}
_SYMBOLS = str.maketrans(
    {
        **{sign: f"\\{name} " for sign, name in (_GREEK | _MATHS).items()},
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},  # full width
        **{sign: "-" for sign in "−–‐‑"},
        **{sign: " " for sign in "\u00a0\u2002\u2003\u2009\u200a\u202f\u3000"},
        **{"°": "^\\circ ", "º": "^\\circ ", "¢": "\\text{cent}", "…": "...", "⁄": "/", "’": "'", "″": '"'},
        **{"、": ",", "。": "."},
    }
)
_REAL = "(-\\infty,\\infty)"
_COMMANDS = {
    **dict.fromkeys(["left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr"], ""),
    **dict.fromkeys(["displaystyle", "textstyle", "limits", "bf", "rm", "it", "sf", "boldmath"], ""),
    **dict.fromkeys(["normalsize", "small", "large", "Large", "LARGE", "huge", "underline", "therefore"], ""),
    **dict.fromkeys(["mathbf", "mathtt", "boldsymbol", "bm", "mathit"], ""),
    **dict.fromkeys(["dfrac", "tfrac", "cfrac", "sfrac", "nicefrac"], "\\frac"),
    **dict.fromkeys(["le", "leq", "leqslant"], "\\le "),
    **dict.fromkeys(["ge", "geq", "geqslant"], "\\ge "),
    **dict.fromkeys(["ne", "neq"], "\\ne "),
    **dict.fromkeys(["lor", "vee"], "\\text{or}"),
    **{"lt": "<", "gt": ">", "in": "\\in ", "colon": ":", "langle": "(", "rangle": ")", "real": _REAL},
    **{"lbrace": "\\{", "rbrace": "\\}", "varnothing": "\\emptyset ", "degree": "^\\circ "},
}
"""Commands that have a simpler form, or that only change the look."""
_MONEY = {"$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rupee"}
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|pi|theta|alpha|beta"
_LAST_STOP = re.compile(r"(?<!\.)\.$")
_TOUCHED = re.compile(r"[\d)}^_(]")
_WORD_BEFORE = re.compile(r"(?:^|[^\\a-zA-Z])[a-zA-Z]{2,}[.,]?\s+$")
_TEXT = r"\\text\{([^{}]*)\}"
_POWER = r"\s*\^\s*\{?([23])\}?"
_BETWEEN = r"[\s.,;:]*(?:(?<![a-zA-Z])[aA]n?(?![a-zA-Z])\s*)?"  # words


def _plain(found: re.Match[str]) -> str:
    """x² as x^{2}, x₁ as x_{1}, ½ as \\frac{1}{2}."""
    plain = unicodedata.normalize("NFKC", found[0]).replace("−", "-")
    if found.lastgroup:
        return f"{'^' if found.lastgroup == 'raised' else '_'}{{{plain}}}"
    return "\\frac{{{}}}{{{}}}".format(*plain.split("⁄"))


def _digits(found: re.Match[str]) -> str:
    return re.sub(r"\D", "", found[0])


def _inside(found: re.Match[str]) -> str:
    return f" {next(filter(None, found.groups()))} "


def _styled(found: re.Match[str]) -> str:
    """Words stay words; numbers and formulas in the dress of words are none."""
    inside = found[1].strip()
    if re.search(r"[\d\\$=+<>]", inside):
        return f" {inside} "
    if inside in _FUNCTIONS.split("|"):
        return f"\\{inside} "
    return inside if inside in ("e", "i") else f"\\text{{{inside}}}"


def _recurring(found: re.Match[str]) -> str:
    whole, fixed, repeated = found[1] or "0", found[2], found[3]
    nines = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), nines)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _spelled(found: re.Match[str]) -> str:
    """twenty-five as 25, two thousand one hundred and five as 2105."""
    total = group = 0
    for word in re.findall("[a-z]+", found[0].lower()):
        if word in _GROUPS:
            total, group = total + group * _GROUPS[word], 0
        elif word != "and":
            group = group * 100 if word == "hundred" else group + _VALUES[word]
    return f"{total + group} " if found[0].endswith("-") else str(total + group)


def _negative(found: re.Match[str]) -> str:
    return (f"\\text{{{found[1]}}}" if found[1].strip() else "") + "-"


def _unspaced(found: re.Match[str]) -> str:
    """A unit with its power: cm^{2} as cm^2."""
    return f"\\text{{{re.sub('[ {}]', '', found[1])}}}"


def _joined(found: re.Match[str]) -> str:
    """Words beside each other as one run of them."""
    return "\\text{" + re.sub(_TEXT, r" \1 ", found[0]).strip() + "}"


def _worded(found: re.Match[str]) -> str:
    """A run of letters that is a word and no product of variables."""
    word = found[1]
    if not word or len(word) == 1:
        return found[0]
    known = word.lower() in SHORT_WORDS or word in UNITS
    known = known or (len(word) > 2 and bool({word.lower(), word.lower().removesuffix("s")} & UNITS.keys()))
    before, after = found.string[: found.start()], found.string[found.end() :]
    if len(word) == 2 and word not in UNITS:  # "at", and not that of at^2 or 2at
        known = known and not _TOUCHED.search(before[-1:] + after[:1])
    elif len(word) == 3:  # beside another word
        known = known or bool(re.match(r"\s+[a-zA-Z]{3}", after) or _WORD_BEFORE.search(before[-30:]))
    return f"\\text{{{word}}}" if known or len(word) > 3 else word


_NUMERAL = r"\d[\d,]*(?:\.\d+)?|\.\d+"
_LETTER = "|".join(name for name in [*UNITS, "min"] if len(name) == 1 or name == "min")
_DRESS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        # x², ½; 10\,000; $x = 5$; twenty-five
        (r"(?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ]+)|(?P<lowered>[₀-₉]+)|[¼-¾⅐-⅞]", _plain),
        (r"\\+\Z", ""),
        (r"(?<![\d.,}])\d{1,3}(?:(?:,?(?:\\[,! ]|~)\s*|\{,\}| )\d{3})+(?![\d,])", _digits),
        (r"(?s)\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$]+?)(?<![\\\s])\$(?!\d)|(?<![\\$])\$ ([^$]+?) \$|"
         r"\\\[(.+?)\\\]|\\\((.+?)\\\)", _inside),
        (_SPELLED, _spelled),
        (r"(?i)^half$", "1/2"),
        (r"(?i)(?<!and )\ban? (?=(?:half|third|quarter|hundred|thousand|million|dozen)\b)", "1 "),
        (r"\b(\d+) \(\1\)", r"\1"),
        (r"\b(\d{1,3})\.(\d{3}),(\d+)\b", r"\1\2.\3"),
        (r"\b(?:USD?|US\$|Rs\.?|EUR)\s?(?=\d)", lambda found: {"R": "₹", "E": "€"}.get(found[0][0], "$")),
        # \color{red}5; {1 \over 2}; no solution; \dfrac; <=; the empty set
        (r"\\(?:(?:text)?color|[hv]space|[hv]?phantom)\*?\s*\{[^{}]*\}", ""),
        (r"(?:\{|^)([^{}=]*)\\over(?![a-zA-Z])([^{}]*)(?:\}|$)", r"\\frac{\1}{\2}"),
        (r"\\log_\s*\{?e\}?(?![a-zA-Z])", r"\\ln "),
        (r"(\\sqrt\s*\[[^\[\]]*\])\s*(\d)", r"\1{\2}"),
        (r"(?<=[\w)}])\s*\\approx\s*[-\d.,]+\s*$", ""),
        (r"(?i)^(?:there (?:is|are|exists?) )?no (?:real )?solutions?(?: exists?)?$", r"\\emptyset "),
        (r"(?i)^(?:the limit )?does not exist$", "DNE"),
        (r"\\[a-zA-Z]+", lambda found: _COMMANDS.get(found[0][1:], found[0])),
        (r"<=|=<", r"\\le "),
        (r">=", r"\\ge "),
        (r"(?<=[\w ])!=(?!=)|\\not\s*=", r"\\ne "),
        (r"\\\{\s*\\\}|(?i:\b(?:the )?(?:empty|null) set\b)|(?i:\\text\{(?:the )?(?:empty|null) set\})",
         r"\\emptyset "),
        (r"^\s*(\d+) to (\d+)\s*$", r"\1:\2"),
        (r"\\mathbb\s*\{?R\}?|\ball real numbers\b|\\text\{all real numbers\}", _REAL.replace("\\", r"\\")),
        # \mathbf{5}; $5, 5 €; 90°; 5%
        (rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}", _styled),
        (r"\\?\$", "$"),
        (rf"([$€£¥₹])\s*(-?(?:{_NUMERAL}))", lambda found: f"{found[2]}\\text{{{_MONEY[found[1]]}}}"),
        (rf"(?<![\w^])({_NUMERAL})\s*([€£¥₹$])", lambda found: f"{found[1]}\\text{{{_MONEY[found[2]]}}}"),
        (r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{)?([CF])\b\}?",
         lambda found: f"\\text{{{'celsius' if found[1] == 'C' else 'fahrenheit'}}}"),
        (r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?", r"\\text{degree}"),
        (r"\\?%", r"\\text{percent}"),
        # 1\,2; **5**; 2**3; √2; sqrt(2); 1e3; x^12; 0.\overline{3}, 0.333...
        (r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\*\*([^*]+)\*\*", r"\1"),
        (r"\*\*", "^"),
        (r"\\root\s*\(([^()]*)\)|(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)",
         lambda found: f"\\sqrt{{{found[1] or found[2]}}}"),
        (r"(?:\\root|(?<![\\a-zA-Z])sqrt)\s*(\d+|[a-z](?![a-z])|\\[a-z]+)", r"\\sqrt{\1}"),
        (r"\\cuberoot\s*\(?([^()\s]+)\)?", r"\\sqrt[3]{\1}"),
        (r"(?<![\\a-zA-Z])(?:infinity|infty|inf)(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
        (r"\b(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})\b", r"\1\\times 10^{\2}"),
        (r"(?<=[\d ])[xX](?= ?10\s*\^)", r"\\times "),
        (r"\^\s*(-?\d+)", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _recurring),
        (r"(?<![\d.])(\d*)\.(\d*?)(\d{1,6}?)\3+(?:\.{3}|\\[lc]?dots)", _recurring),
        # 5 cm^2; \frac{\text{m}}{\text{s}}; 5 apples; km/h; minus 5; 5 (ways); x is 5; 1,000
        (_TEXT + _POWER, r"\\text{\1^\2}"),
        (rf"\\frac\s*\{{\s*{_TEXT}\s*\}}\s*\{{\s*{_TEXT}\s*\}}", r"\\text{\1 per \2}"),
        (rf"(?:(?<=[\d}}])|(?<= sq))\s+((?:{_LETTER})(?:{_POWER})?)(?=\s*(?:/|$|[.,;\d]|\\text))", _unspaced),
        (r"\\(?:begin|end)\{\w+\*?\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|([^\W\d_]+(?:'[^\W\d_]+)*)", _worded),
        (_TEXT + _POWER, r"\\text{\1^\2}"),
        (_TEXT + r"\s*/\s*(?:\\text\{\s*)?([a-zA-Z]+(?:\s*\^\s*\{?[23]\}?)?)\}?",
         lambda found: f"\\text{{{found[1]} per {re.sub('[{}]', '', found[2])}}}"),
        (r"(?i)\\text\{([^{}]*?)\b(?:minus|negative)\s*\}\s*(?=\\?\w)", _negative),
        (rf"{_TEXT}(?:{_BETWEEN}{_TEXT})+", _joined),
        (rf"(?<=[\s\d}}])\(\s*{_TEXT}\s*\)", r"\\text{\1}"),
        (r"(?<=[\w})|])\s*\\text\{\s*(?:is|are|was|equals|is equal to|must\s+(?:be|equal))\s*\}(?=\s*[^\s.])",
         " = "),
        (r"(?:(?<![\d.,(\[{])|(?<=frac\{)|(?<=\}\{))\d{1,3}(?:,\d{3})+(?![\d,])", _digits),
    )
)  # fmt: skip
"""Applied in this order. Above each group is what it reads."""


def canonical(text: str) -> str:
    """An answer in the one dress."""
    text = unframed(_LAST_STOP.sub("", unicodedata.normalize("NFC", text).strip().strip('*`"')))
    text = _LAST_STOP.sub("", text).translate(_SYMBOLS)
    for pattern, new in _DRESS:
        text = pattern.sub(new, text)
    return " ".join(text.split())
