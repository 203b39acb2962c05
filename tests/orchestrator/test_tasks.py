"""The order of training tasks: shares by weight, seeded epochs, and going on in the middle."""

import pytest

from silva.orchestrator.tasks import TaskStream, World
from silva.types import Task


class Listed:
    def __init__(self, label, size):
        self.all = [Task(f"{label}{i}", label, i, {}) for i in range(size)]

    def tasks(self, split):
        assert split == "train"
        return self.all


def stream(seed=0, position=None, weights=(1.0, 3.0), sizes=(5, 7)):
    worlds = [World(n, Listed(n, s), w) for n, s, w in zip("ab", sizes, weights, strict=True)]
    return TaskStream(worlds, seed, position)


def drawn(stream, count):
    return [stream.draw()[1].id for _ in range(count)]


@pytest.mark.parametrize(
    ("weights", "order"),
    [((1.0, 1.0), "abababab"), ((1.0, 3.0), "bbabbbab"), ((0.5, 0.25), "aabaabaa"), ((2.0, 2.0), "abababab")],
)
def test_environments_take_turns_by_weight(weights, order):
    assert "".join(id[0] for id in drawn(stream(weights=weights), 8)) == order


def test_every_epoch_has_each_task_once_in_an_order_of_its_own():
    ids = [id for id in drawn(stream(weights=(1.0, 1.0)), 42) if id[0] == "b"]
    epochs = [ids[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == [f"b{i}" for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_decides_the_order():
    assert drawn(stream(seed=3), 30) == drawn(stream(seed=3), 30) != drawn(stream(seed=4), 30)


@pytest.mark.parametrize("done", [0, 1, 6, 19, 40])
def test_a_position_is_all_there_is_to_go_on_from(done):
    whole = drawn(stream(), 60)
    first = stream()
    assert drawn(first, done) == whole[:done]
    assert sum(first.position.values()) == done
    assert drawn(stream(position=dict(first.position)), 60 - done) == whole[done:]


def test_an_environment_that_is_new_in_the_position_begins_at_its_start():
    assert stream(position={"a": 4}).position == {"a": 4, "b": 0}
