r"""Whether an answer commits to one value and has worked it out. Pure functions of text.

A comparison by value takes 3 + 4 for 7 and \int_0^1 x\,dx for 1/2: an agent that repeats the question would
be right. Of "41 or 42" a reader may take either. So

    - an answer is one expression: in a sentence, the only number or the only formula
    - where the reference is a number that is written out (7, -0.5, 1/2, 3\frac{1}{2}, 20\%), so is the
      answer; a fraction only where the reference is no integer (not 84/2 for 42)
    - an answer has sums, integrals, limits, factorials and the like only if the reference has them

What this cannot see: the same expression in another form, such as (x+1)^2 for x^2 + 2x + 1.
"""

from __future__ import annotations

import re

from silva.rewards.answers import boxed

_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$([^$]+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.S)
_NUMERAL = r"(?:\d{1,3}(?:(?:,\s?|\{,\}|\\,|,\\!\s*| )\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_DIGITS = r"(?:\{\s*[-+]?\d+\s*\}|\d)"
_FRACTION = rf"\\[cdt]?frac\s*{_DIGITS}\s*{_DIGITS}|\d+\s*(?:/|\\div)\s*\d+"
_POWER = rf"10\s*\^\s*{_DIGITS}"
_UNIT = (
    r"(?:\\(?:text\w*|mathrm|mbox)\s*\{[^{}\d]*\}|\\[ ,;!]|~|\s|\\?%|\^\s*\{?(?:\\circ|[23])\}?|[°²³€£$]|"
    r"(?i:percentage|percent|pct)|\\?[a-zA-Z]+(?![a-zA-Z({]))*"
)
_WRITTEN = re.compile(
    r"(?:\\?[a-zA-Z]+(?:_\{?\w+\}?)?\s*=)?\s*\(?\s*(?:\\left\()?[-+−]?\s*\\?[$€£]?\s*"
    rf"(?:(?:{_NUMERAL})(?:\s*(?:\\times|\\cdot|\*|×)\s*{_POWER})?|{_POWER}|(?:\d+\s*)?(?P<fraction>{_FRACTION}))"
    rf"\s*(?:\\right)?\)?{_UNIT}\.?"
)
_IN_PROSE = re.compile(rf"[-−]?[$€£]?(?:{_NUMERAL})(?:\s?/\s?\d+)?")
_PROSE = re.compile(r"[^\W\d_]{2,}")
_POINT = re.compile(r"\.\d|%|\^\s*\{\s*-")
_UNDONE = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim(?:sup|inf)?|[dt]?binom|partial|gcd|det|min|max|operatorname|[bp]?mod)"
    r"(?![a-zA-Z])|(?<!\\)!|\\[dt]?frac\s*\{\s*\\?(?:mathrm)?\{?d\b"
)


def commits(answer: str, reference: str) -> bool:
    """Whether the answer has a form in which it may be compared with this reference."""
    inner = boxed(reference)
    expected, given = expression(reference if inner is None else inner), expression(answer)
    if given is None or expected is None:
        return expected is None  # a reference of no clear form asks for none
    written = _WRITTEN.fullmatch(expected)
    if written is None:
        return set(_UNDONE.findall(given)) <= set(_UNDONE.findall(expected))
    found = _WRITTEN.fullmatch(given)
    return found is not None and (
        found["fraction"] is None or written["fraction"] is not None or bool(_POINT.search(expected))
    )


def expression(answer: str) -> str | None:
    """The one number or formula of an answer; a text without any is its own. None: there are several."""
    answer = answer.strip().strip("*` ").removesuffix(".").strip()
    formulas = [next(filter(None, found.groups()), "").strip() for found in _FORMULA.finditer(answer)]
    if formulas:
        rest = _FORMULA.sub(" ", answer)
        return None if re.search(r"\d", rest) else ", ".join(formulas)
    if "\\" in answer or not _PROSE.search(answer):
        return answer
    numbers = _IN_PROSE.findall(answer)
    return None if len(numbers) > 1 else numbers[0].strip() if numbers else answer
