"""Grades one answer with reasoning-gym, in a sandbox: `reasoning_gym.Grader` runs this source there.

Standard input is JSON: {task, config, seed, question, answer, mark}. It prints the mark and the score. This
file imports nothing of Silva.

About ten graders of the library call `eval` or sympy's `parse_expr` on the answer. What they evaluate may be
arithmetic and lists, and nothing else: an attribute, an import, a function that is no mathematics or a
variable of the grader itself (`oracle_answer`) ends the grading with 0 before any of it runs. The sandbox
stands around that for whatever this does not see.
"""

import dis
import json
import random
import sys
import types
from typing import Any

HARMLESS = {
    "abs", "bool", "complex", "dict", "divmod", "float", "int", "len", "list", "max", "min", "pow", "range",
    "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
MAKERS = ("dataclasses", "collections", "enum", "typing", "importlib")
"""Modules that make code themselves, when a library is imported late."""
ALL_OF_SYMPY = compile("from sympy import *", "<string>", "exec")  # what `parse_expr` begins with


class AnswerRefused(BaseException):
    """The answer is a program. No `except Exception` of a grader catches it."""


def harmless(code: types.CodeType, sympy: Any) -> bool:
    """Whether code computes with numbers, lists and functions of sympy alone.

    Args:
        sympy: the module, where its `parse_expr` evaluates: its names and single letters are allowed then.
    """
    if (code.co_code, code.co_names, code.co_consts) == (
        ALL_OF_SYMPY.co_code, ALL_OF_SYMPY.co_names, ALL_OF_SYMPY.co_consts,
    ):  # fmt: skip
        return True
    if any(isinstance(each, types.CodeType) for each in code.co_consts):
        return False  # a lambda or a comprehension
    for step in dis.get_instructions(code):
        if any(word in step.opname for word in ("ATTR", "METHOD", "IMPORT", "STORE", "DELETE")):
            return False
    return all(
        name in HARMLESS or (sympy is not None and (len(name) == 1 or _is_mathematics(name, sympy)))
        for name in code.co_names
    )


def _is_mathematics(name: str, sympy: Any) -> bool:
    found = getattr(sympy, name, None)
    if isinstance(found, type):
        return issubclass(found, sympy.Basic)
    return isinstance(found, sympy.Basic) or name in ("sqrt", "cbrt", "root", "Abs", "diff", "integrate")


class CodeWatch:
    """An audit hook: looks at all code that is made from text while it is `on`."""

    on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "exec" or not self.on:
            return
        code = arguments[0]
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        named = not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen")
        if named or caller.partition(".")[0] in MAKERS:
            return
        self.on = False  # the check imports and evaluates too
        fine = harmless(code, sys.modules.get("sympy") if caller.startswith("sympy.") else None)
        self.on = True
        if not fine:
            raise AnswerRefused


def graded(asked: dict[str, Any], watch: CodeWatch) -> float:
    import reasoning_gym

    random.seed(asked["seed"])
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(asked["seed"] % 2**32)
    dataset = reasoning_gym.create_dataset(asked["task"], seed=asked["seed"], size=1, **asked["config"])
    entry = dataset[0]
    if entry["question"] != asked["question"]:
        raise RuntimeError("the same seed makes another problem in another process: it cannot be graded")
    watch.on = True
    try:
        return float(dataset.score_answer(asked["answer"], entry))
    except (AnswerRefused, MemoryError, RecursionError):  # the answer's doing
        return 0.0
    finally:
        watch.on = False


def main() -> None:
    asked, watch = json.load(sys.stdin), CodeWatch()
    sys.addaudithook(watch)
    score = graded(asked, watch)
    print(f"\n{asked['mark']}{json.dumps(score)}")


if __name__ == "__main__":
    main()
