"""The order of training tasks: shares by weight, seeded passes, and going on in the middle."""

import json

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from silva.algorithms.filters import DifficultyPools
from silva.orchestrator.tasks import Source, TaskStream
from silva.types import Group, Segment, Task, Trajectory, Turn


class Listed:
    def __init__(self, label, size):
        self.all = [Task(f"{label}{i}", label, i, {"n": i}) for i in range(size)]

    def tasks(self, split):
        assert split == "train"
        return self.all


def at(stream, **state):
    stream.load(state)
    return stream


def stream(seed=0, weights=(1.0, 3.0), sizes=(5, 7)):
    sources = [Source(n, Listed(n, s), w) for n, s, w in zip("ab", sizes, weights, strict=True)]
    return TaskStream(sources, seed)


def drawn(stream, count):
    return [stream.draw()[1].id for _ in range(count)]


@pytest.mark.parametrize(
    ("weights", "order"),
    [((1.0, 1.0), "abababab"), ((1.0, 3.0), "bbabbbab"), ((0.5, 0.25), "aabaabaa"), ((2.0, 2.0), "abababab")],
)
def test_environments_take_turns_by_weight(weights, order):
    assert "".join(id[0] for id in drawn(stream(weights=weights), 8)) == order


@examples(max_examples=40, deadline=None, derandomize=True)
@given(
    size=st.one_of(st.integers(1, 40), st.integers(41, 800)),
    step=st.integers(1, 60),
    seed=st.integers(0, 99),
    done=st.integers(0, 2000),
    others=st.integers(1, 30),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0])),
)
@example(size=20_000, step=24, seed=0, done=31_007, others=3, weights=(3.0, 1.0))
@example(size=2, step=2, seed=0, done=3, others=1, weights=(1.0, 1.0))
@example(size=7_473, step=24, seed=1, done=7_473, others=3, weights=(3.0, 1.0))
@pytest.mark.slow
def test_each_pass_has_every_row_once_and_no_step_has_one_twice(size, step, seed, done, others, weights):
    sources = [Source(n, Listed(n, s), w) for n, s, w in zip("ab", (size, others), weights, strict=True)]

    whole = TaskStream(sources, seed, step=step)
    drawn_of_a, draws = [], 0
    while len(drawn_of_a) < 3 * size:
        if draws == done:
            resumed = at(TaskStream(sources, seed, step=step), **whole.state())
        source, task = whole.draw()
        draws += 1
        if draws > done:
            assert resumed.draw()[1] == task
        drawn_of_a += [task.id] if source.label == "a" else []
    laps = [drawn_of_a[i * size : (i + 1) * size] for i in range(3)]
    assert all(len(set(lap)) == size for lap in laps)
    if size > max(9, step):
        assert laps[0] != laps[1] != laps[2] != laps[0]
    last = {}
    for place, id in enumerate(drawn_of_a):
        assert place - last.get(id, -size) >= min(max(step, size // 2), size)
        last[id] = place


@pytest.mark.slow
@examples(max_examples=40, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 300),
    others=st.integers(1, 40),
    step=st.integers(1, 40),
    seed=st.integers(0, 99),
    solved=st.floats(0, 1),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0])),
    done=st.integers(0, 150),
)
@example(size=4, others=1, step=2, seed=0, solved=0.5, share=0.0, weights=(1.0, 1.0), done=7)
@example(size=20_000, others=30, step=24, seed=0, solved=0.99, share=0.1, weights=(1.0, 1.0), done=99)
def test_no_step_repeats_a_task_while_pools_leave_as_many_normal_ones(
    size, others, step, seed, solved, share, weights, done
):
    sources = [Source(n, Listed(n, s), w) for n, s, w in zip("ab", (size, others), weights, strict=True)]
    settings = DifficultyPools(easy_fraction=share, hard_fraction=share)
    pools = {f"a/a{i}": "easy" if i % 2 else "hard" for i in range(int(solved * size))}

    whole = at(TaskStream(sources, seed, step=step, settings=settings), pools=pools)
    drawn_of = {"a": [], "b": []}
    for draws in range(200):
        if draws == done:
            resumed = TaskStream(sources, seed, step=step, settings=settings)
            resumed.load(json.loads(json.dumps(whole.state())))
        source, task = whole.draw()
        if draws >= done:
            assert resumed.draw()[1] == task
        drawn_of[source.label].append(task.id)
    for label, ids in drawn_of.items():
        normal = size - len(pools) if label == "a" else others
        for start in range(len(ids) - step if normal >= step else 0):
            assert len(set(ids[start : start + step])) == step


def test_going_on_makes_the_tasks_of_one_pass_and_no_more():
    """Some worlds take milliseconds to make a task."""

    class Made(Listed):
        def __getitem__(self, index):
            self.count += 1
            return self.all[index]

        def __len__(self):
            return len(self.all)

        def tasks(self, split):
            return self

    made = Made("a", 50)
    made.count = 0
    at(TaskStream([Source("a", made, 1.0)], 0), position={"a": 1007}).draw()
    assert made.count == 51


def test_what_repeats_in_a_world_is_drawn_once_a_pass():
    """Of 3,000 indices of a made-up world only 50 differ."""
    made = Listed("a", 3000)
    made.all = [Task(f"a{i}", "a", i, {"n": i % 50}) for i in range(3000)]
    made = TaskStream([Source("a", made, 1.0)], 0, step=8)
    draws = [made.draw()[1] for _ in range(200)]
    numbers = [task.data["n"] for task in draws]
    assert all(sorted(numbers[i : i + 50]) == list(range(50)) for i in (0, 50, 100, 150))
    assert all(len(set(numbers[i : i + 25])) == 25 for i in range(175))
    assert made.position == {"a": 200}
    assert len({(task.id, task.seed) for task in draws}) == 200, "a later pass has another noise"


def test_the_seed_decides_the_order():
    assert drawn(stream(seed=3), 30) == drawn(stream(seed=3), 30) != drawn(stream(seed=4), 30)


def test_an_environment_that_is_new_in_the_position_begins_at_its_start():
    assert at(stream(), position={"a": 4}).position == {"a": 4, "b": 0}


def played(task, *rewards):
    turn = Turn("t", (Segment("environment", (1,)),), fresh=True)
    return Group(
        task.id,
        task,
        tuple(Trajectory(f"{task.id}/{i}", (turn,), "terminated", {"r": r}) for i, r in enumerate(rewards)),
    )


def pooled(weights=(1.0,), pools=None, **settings):
    sources = [Source(name, Listed(name, 40), weight) for name, weight in zip("ab", weights, strict=False)]
    return at(TaskStream(sources, 0, settings=DifficultyPools(**settings)), pools=pools or {})


def test_pools_by_the_mean_of_the_last_group():
    made = pooled(easy_threshold=0.9, hard_threshold=0.1)
    tasks = Listed("a", 4).all
    for task, rewards in zip(tasks, [(1, 1), (0, 0), (1, 0), (1, 1)], strict=True):
        made.remember(played(task, *rewards))
    assert made.pools == {"a/a0": "easy", "a/a1": "hard", "a/a3": "easy"}
    made.remember(played(tasks[3], 1, 0))
    assert made.pools == {"a/a0": "easy", "a/a1": "hard"}


def test_pools_that_have_changed_are_those_of_a_restart():
    """With 38 of 40 tasks in pools only half of the normal ones are avoided, so how many are left counts."""
    tasks = Listed("a", 40)
    made, again = (
        TaskStream([Source("a", tasks, 1.0)], 0, step=8, settings=DifficultyPools(easy_fraction=0.2))
        for _ in range(2)
    )
    for task in tasks.all:
        made.remember(played(task, 1, 1))
    for task in tasks.all[:2]:
        made.remember(played(task, 1, 0))
    again.load(made.state())
    assert drawn(made, 60) == drawn(again, 60)


def test_tasks_that_are_fewer_than_a_step_come_in_turns_with_pools_too():
    made = Listed("a", 30)
    made.all = [Task(f"a{i}", "a", i, {"n": i % 3}) for i in range(30)]
    made = TaskStream([Source("a", made, 1.0)], 0, step=8, settings=DifficultyPools())
    ids = drawn(made, 30)
    assert all(len(set(ids[i : i + 3])) == 3 for i in range(28))
    assert made.recent == {"a": ids[-8:]}


def test_where_few_tasks_are_normal_the_next_one_is_found_within_a_pass():
    sources = [Source("a", Listed("a", 40), 1.0)]
    made = TaskStream(sources, 0, step=8, settings=DifficultyPools(easy_fraction=0.0))
    made.load({"pools": {f"a/a{i}": "easy" for i in range(36)}})
    ids = drawn(made, 40)
    assert all(len(set(ids[i : i + 3])) == 3 for i in range(38))  # half of the four are avoided
    assert made.position["a"] <= 40 * 40


def test_what_it_says_of_itself_stays_as_it_was():
    """A checkpoint may be written when the next step has drawn already."""
    made = pooled(pools={"a/a0": "easy"})
    drawn(made, 3)
    said = made.state()
    before = json.dumps(said)
    drawn(made, 3)
    made.remember(played(Listed("a", 2).all[1], 1))
    assert json.dumps(said) == before != json.dumps(made.state())


def test_easy_and_hard_tasks_come_again_as_often_as_their_shares_say():
    pools = {f"a/a{i}": "easy" if i < 20 else "hard" for i in range(30)}
    made = pooled(pools=pools, easy_fraction=0.0, hard_fraction=0.5)
    ids = [int(id[1:]) for id in drawn(made, 400)]
    assert min(ids) == 20
    hard, normal = sum(i < 30 for i in ids), sum(i >= 30 for i in ids)
    assert 0.4 < hard / normal < 0.6  # ten tasks each; standard error 0.04
    assert drawn(pooled(), 40) == drawn(TaskStream([Source("a", Listed("a", 40), 1.0)], 0), 40)


def test_where_every_task_is_passed_over_the_last_one_comes_all_the_same():
    made = pooled(pools={f"a/a{i}": "easy" for i in range(40)}, easy_fraction=0.0)
    assert drawn(made, 1) == drawn(at(pooled(), position={"a": 79}), 1)
    assert made.position == {"a": 80}


@pytest.mark.slow
def test_what_is_passed_over_is_no_part_of_a_share():
    """Of world a nearly every task is easy: it is looked at ten times for one that is drawn."""
    pools = {f"a/a{i}": "easy" for i in range(40)}
    made = pooled(pools=pools, weights=(1.0, 1.0), easy_fraction=0.1)
    assert sum(id[0] == "a" for id in drawn(made, 2000)) == 1000
    made = pooled(pools=pools, weights=(1.0, 3.0), easy_fraction=0.1)
    ids = drawn(made, 400)
    assert sum(id[0] == "a" for id in ids) == 100
    assert made.position["a"] - made.passed["a"] == 100 and made.passed["a"] > 500
    assert (made.position["b"], made.passed["b"]) == (300, 0)
