"""Whether a problem is held out is decided by what it asks, where that can be seen."""

from __future__ import annotations

from silva.environments.foreign.seeds import seeded
from silva.environments.settings import EnvironmentSettings


def taskset(begins, **keys):
    return seeded(
        EnvironmentSettings(type="mine", eval_size=20, train_size=200, **keys), begins, lambda task: None
    )


def begin_of(tasks, begins) -> set[str]:
    return {begins(task.data["seed"]) for task in tasks}


def test_problems_that_begin_alike_are_in_one_split() -> None:
    def begins(seed: int) -> str:
        return f"field {seed % 97}"  # 97 problems, drawn again and again

    found = taskset(begins)
    train, held_out = begin_of(found.tasks("train"), begins), begin_of(found.tasks("eval"), begins)
    assert not found.notes and len(train) > 30 and len(held_out) > 5
    assert not train & held_out


def test_problems_that_all_begin_alike_are_told_apart_by_seed_and_it_is_said() -> None:
    found = taskset(lambda seed: "the same")
    assert "16 seeds begin in 1 different ways" in found.notes[0]
    seeds = [{task.data["seed"] for task in found.tasks(split)} for split in ("train", "eval")]
    assert len(seeds[0]) == 200 and len(seeds[1]) == 20 and not seeds[0] & seeds[1]


def test_problems_that_cannot_be_seen_beforehand() -> None:
    assert "cannot be seen beforehand" in taskset(None).notes[0]
