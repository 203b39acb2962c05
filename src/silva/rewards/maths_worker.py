"""A process that compares mathematical answers with math-verify: `python -P maths_worker.py SECONDS`.

It writes an empty line once it is ready. Then it reads one question a line, {"answer", "references"}, and
writes one line for each, {"same", "parsed"}. It kills itself (SIGPROF) if one question takes more than
SECONDS of CPU time, and it ends when its input ends. What a model wrote is read by sympy here, and never in
the process of a run. This file imports nothing of Silva, so that it starts quickly.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY = 4 << 30  # bytes of address space
CLOSE = 2e-6
"""Relative difference up to which two numbers are the same: 0.333333 is 1/3. math-verify alone compares six
places, so that 0 would be 1e-7."""
_UPRIGHT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}")
"""Numbers that math-verify would take for units and drop, so that 1 + 1/e would be 1 - 1/e."""
_LATEX = re.compile(r"\\(?:text|mathrm|textbf|mbox|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTION = re.compile(
    r"\b(?:a?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|exp|sqrt|pi|inf|infty|mod|max|min|gcd|lcm)\b"
)
_WORD = re.compile(r"[^\W\d_]{2,}")


def main(seconds: float) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    same("$\\frac{1}{2}$", ["0.5"])  # whatever is loaded late
    print(file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            found = same(question["answer"], question["references"])
        except ImportError:
            raise
        except Exception:  # sympy's about an expression: MemoryError, RecursionError, TypeError, ...
            found = {"same": False, "parsed": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), file=answers, flush=True)


def same(answer: str, references: list[str]) -> dict[str, bool]:
    """Whether the answer is one of the references, and whether it could be read at all."""
    given = parsed(answer)
    return {"same": any(_equal(parsed(each), given) for each in references), "parsed": bool(given)}


def parsed(text: str) -> list[Any]:
    """What math-verify makes of a text: expressions, and the text itself where it is no expression."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = _UPRIGHT.sub(r"\1", text.replace("\\$", ""))  # no dollars
    latex, plain = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
    configs: list[Any] = [latex, plain]
    if not any(opening in text for opening in ("$", "\\(", "\\[", "\\boxed")):
        if not _is_sentence(text):
            # All of it or nothing: the plain numbers in it are no answer.
            text, configs = f"\\boxed{{{text}}}", [latex]
        elif "\\" in text:
            return []
    found: list[Any] = parse(text, configs, parsing_timeout=None)
    return found


def _is_sentence(text: str) -> bool:
    return bool(_WORD.search(_FUNCTION.sub(" ", _LATEX.sub(" ", text))))


def _equal(expected: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return any(
        verify(right, each, timeout_seconds=None) and _is_close(right, each)
        for right in expected
        for each in given
    )


def _is_close(right: Any, given: Any) -> bool:
    """False for two numbers that differ although math-verify found them the same."""
    if not (getattr(right, "is_number", False) and getattr(given, "is_number", False)) or right == given:
        return True
    if str(given).count("/100") != str(right).count("/100"):
        return True  # with or without a percent sign, as math-verify has it
    difference, size = abs((right - given).doit().evalf(30)), abs(right.doit().evalf(30))
    return bool(difference <= CLOSE * size)


if __name__ == "__main__":
    main(float(sys.argv[1]))
