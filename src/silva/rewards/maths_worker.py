"""A process that compares mathematical answers with math-verify: `python -P maths_worker.py SECONDS`.

It writes an empty line once it is ready. Then it reads one question a line, {"answer", "references"}, each a
tree of maths_form.py, and writes one line for each: whether the answer is one of the references. It kills
itself (SIGPROF) if one question takes more than SECONDS of CPU time, and it ends when its input ends. What a
model wrote is read by sympy here, and never in the process of a run. This file imports nothing of Silva, so
that it starts quickly.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space
CLOSE = 2e-6
"""Relative difference up to which two numbers are the same: 0.333333 is 1/3. math-verify alone compares six
places, so that 0 would be 1e-7."""
_TEXT = re.compile(r"\\text|:|_\{\d+\}$")
"""Words, ratios and numbers of another base, which math-verify would drop, divide or read as names."""
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in)(?![a-zA-Z])")


def main(seconds: float) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    same("\\frac{1}{2}", "0.5")  # whatever is loaded late
    print(file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            found = any(same(right, question["answer"]) for right in question["references"])
        except ImportError:
            raise
        except Exception:  # sympy's about an expression: MemoryError, RecursionError, TypeError, ...
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        parsed.cache_clear()
        print(json.dumps(found), file=answers, flush=True)


def same(right: Any, given: Any) -> bool:
    """Whether two trees say the same."""
    for one, other in ((right, given), (given, right)):
        if one[0] == "=" and isinstance(other, str) and _RELATION.search(other):  # another form of it
            return _same_expression(_relation(*one[1:]), other)
    if given[0] == "=":
        return _same_named(right, *given[1:])
    if right[0] == "=":
        return same(right[2], given)
    if isinstance(right, str) and isinstance(given, str):
        return _same_expression(right, given)
    right, given = _unnamed(right, given), _unnamed(given, right)
    if isinstance(right, str) or isinstance(given, str) or (right[0], len(right)) != (given[0], len(given)):
        return False
    if right[0] not in ("{}", "{=}", "U"):
        return all(map(same, right[1:], given[1:]))
    rest = list(given[1:])
    for each in right[1:]:
        match = next((index for index, other in enumerate(rest) if same(each, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _unnamed(tree: Any, other: Any) -> Any:
    """x = 1, y = 2 as the point (1, 2), and x_1 = 1, x_2 = 2 as the list 1, 2, if the other is one."""
    if tree[0] != "{=}" or other[0] not in ("()", "{}") or any(each[0] != "=" for each in tree[1:]):
        return tree
    items = sorted(tree[1:], key=lambda each: str(each[1]))
    same_letter = len({name.partition("_")[0] for _, name, *_ in items}) == 1
    return [other[0], *(each[2] for each in items)] if same_letter or other[0] == "()" else tree


def _same_named(right: Any, name: str, value: Any, *steps: Any) -> bool:
    """Whether name = value is what `right` says, and each of the steps between them too."""
    if right[0] == "=":
        if right[1] and name and right[1] != name:
            return False
        right = right[2]
    return all(same(right, each) for each in (value, *steps))


def _relation(name: str, value: Any, *steps: Any) -> str:
    """x = 5 or x < 5 as an expression; nothing for what has no such form."""
    if isinstance(value, str) and not steps:
        return f"{name}={value}"
    if value[0] not in ("()", "(]", "[)", "[]") or not all(isinstance(each, str) for each in value[1:]):
        return ""
    (opening, closing), low, high = value
    below, above = "<" if opening == "(" else "\\le ", "<" if closing == ")" else "\\le "
    return ("" if "infty" in low else low + below) + name + ("" if "infty" in high else above + high)


def _same_expression(right: str, given: str) -> bool:
    if not right or not given:
        return False
    from math_verify import verify

    if right == given or _TEXT.search(right) or _TEXT.search(given):
        return right == given
    if bool(_RELATION.search(right)) != bool(_RELATION.search(given)):
        return False
    return any(
        verify(one, other, timeout_seconds=None) and _is_close(one, other)
        for one in parsed(right)
        for other in parsed(given)
    )


@cache
def parsed(expression: str) -> list[Any]:
    """What math-verify makes of an expression, and its text; nothing if it cannot read all of it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    nothing_dropped = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all", equations=False
    )
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=nothing_dropped)
    found: list[Any] = parse(f"\\boxed{{{expression}}}", [config], parsing_timeout=None)
    return found


def _is_close(right: Any, given: Any) -> bool:
    """False for two numbers that differ although math-verify found them the same."""
    if not (getattr(right, "is_number", False) and getattr(given, "is_number", False)) or right == given:
        return True
    difference, size = abs((right - given).doit().evalf(30)), abs(right.doit().evalf(30))
    return bool(difference <= CLOSE * size)


if __name__ == "__main__":
    main(float(sys.argv[1]))
