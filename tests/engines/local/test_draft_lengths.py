"""How many tokens are drafted, by chances and measured times, and when looking ahead pauses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.engines.local.drafts import MARGIN, Chances, Drafts, Lookahead, StepTimes, StepWork
from silva.engines.local.history import Guess, Trail
from silva.engines.local.request import EngineRequest, EngineStats
from silva.models.row_rules import ANY
from silva.types import SamplingParams


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the times that tests give them; what drafts take themselves would come on top, on a busy
    machine much."""
    monkeypatch.setattr(Drafts, "_at_work", lambda drafts: nullcontext())


def test_times_of_steps_are_fitted() -> None:
    """Against the numbers they were made of; a step that took long for another reason hardly counts."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows, prompt = int(rng.integers(1, 65)), int(rng.integers(0, 2) * rng.integers(0, 300))
        times.learn(rows, prompt, 0.040 + 0.002 * rows + 0.0005 * prompt + rng.normal(0, 1e-4))
    assert times.of(8) == pytest.approx(0.056, rel=0.02)
    assert times.of(28) == pytest.approx(0.040 + 0.002 * 26.5, rel=0.02)  # on a stair from 25 to 28
    assert times.of(8, 100) == pytest.approx(0.106, rel=0.02)
    assert times.row == pytest.approx(0.002, rel=0.05)
    times.learn(8, 0, 60.0)
    assert times.of(8) < 0.1


def test_times_rise_in_stairs() -> None:
    """As matrix products do, whose kernels take eight rows at once, say."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows = int(rng.integers(1, 33))
        times.learn(rows, 0, 0.060 + 0.016 * (-(-rows // 8) - 1) + rng.normal(0, 1e-3))
    found = [times.of(rows) for rows in (8, 9, 16, 17, 24, 32)]
    assert found == pytest.approx([0.060, 0.076, 0.076, 0.092, 0.092, 0.108], rel=0.04)


def test_rows_are_cheap_where_steps_are_long() -> None:
    """Of 80 rows and 150 tokens of prompts, a row takes less than a two-hundredth of a step."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows, prompt = int(rng.integers(60, 100)), int(rng.integers(100, 200))
        seconds = 0.03 + 0.0013 * (rows + prompt) + rng.normal(0, 1e-4)
        times.learn(rows, prompt, seconds, drafting=True)
    assert times.row == pytest.approx(0.0013, rel=0.05)
    assert times.of(32, drafting=True) == pytest.approx(0.03 + 0.0013 * 32, rel=0.1)


def test_a_step_with_drafts_has_a_price_of_its_own() -> None:
    times, rng = StepTimes(), np.random.default_rng(0)
    for step in range(600):
        rows, prompt = int(rng.integers(1, 65)), 30 * (step % 2)
        drafting = bool(rng.integers(2))
        times.learn(rows, prompt, 0.04 + 0.001 * (rows + prompt) + 0.02 * drafting, drafting=drafting)
    for prompt in (0, 30):
        more = times.of(16, prompt, drafting=True) - times.of(16, prompt)
        assert more == pytest.approx(0.02, rel=0.15)


def test_before_much_is_measured_28_rows_cost_as_much_as_the_rest_of_a_step() -> None:
    times = StepTimes()
    times.learn(8, 0, 0.080)
    assert times.of(8) == pytest.approx(0.080, rel=0.1)
    assert times.of(20) - times.of(12) == pytest.approx(8 * 0.080 / 36)


def test_chances_are_shares_of_hits() -> None:
    chances, sure, unsure = Chances(), Guess(1, 0, 8, 8), Guess(1, 3, 1, 1)
    assert chances.of(sure) == pytest.approx(8 / 9) and chances.of(unsure) == pytest.approx(1 / 2)
    for number in range(300):
        chances.learn(sure, number % 10 != 0)
        chances.learn(unsure, number % 10 == 0)
    assert chances.of(sure) == pytest.approx(0.9, abs=0.01)
    assert chances.of(unsure) == pytest.approx(0.1, abs=0.01)
    for _ in range(1000):  # the policy has changed
        chances.learn(sure, False)
    assert chances.of(sure) < 0.15


@pytest.mark.slow
@given(
    chances=st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=4),
    row=st.floats(0.001, 1),
    stair=st.floats(0, 1),
    own=st.floats(0, 1),
)
def test_the_drafts_chosen_give_the_most_tokens_a_second(
    chances: list[list[float]], row: float, stair: float, own: float
) -> None:
    """Against all combinations of lengths, where a fifth row costs a stair as well, and a first draft."""
    drafts = Drafts(100, ANY, EngineStats())
    times = drafts._times
    times._base, times.row, times._steps = 1.0, row, 1
    times._measured = {
        (rows, drafting): ((1 + row * rows + stair * (rows > 4) + own * drafting) * 1e9, 1e9, 1)
        for rows in range(1, 65)
        for drafting in (False, True)
    }
    requests, offers, gains = [], [], []
    for number, each in enumerate(chances):
        likely = np.cumprod(each)
        request = EngineRequest(np.array([1]), SamplingParams(50), None)  # type: ignore[arg-type]
        request.lookahead = Lookahead(Trail(drafts._history), guesses=[Guess(9, 0, 1, 1)] * len(each))
        requests.append(request)
        offers += [(-float(chance), 0, number, length) for length, chance in enumerate(likely, 1)]
        gains.append(np.append(0.0, np.cumsum(likely)))

    def rate(lengths: Sequence[int]) -> float:
        tokens = len(requests) + sum(gain[length] for gain, length in zip(gains, lengths, strict=True))
        rows = len(requests) + sum(lengths)
        rows = rows if rows <= 8 else -(-rows // 4) * 4
        return float(tokens) / (1 + row * rows + stair * (rows > 4) + own * (sum(lengths) > 0))

    drafts._choose(requests, sorted(offers), [1] * len(requests), 0, 0)
    none, found = rate([0] * len(requests)), rate([len(request.draft) for request in requests])
    best = max(map(rate, itertools.product(*(range(len(each) + 1) for each in chances))))
    assert found == pytest.approx(best if best > MARGIN * none else none, rel=1e-6)


def silent(drafts: Drafts, count: int) -> list[EngineRequest]:
    """Requests of which nothing is learned but time."""
    made = [EngineRequest(np.array([1]), SamplingParams(50), None) for _ in range(count)]  # type: ignore[arg-type]
    for request in made:
        request.lookahead = Lookahead(Trail(drafts._history))
    return made


@pytest.mark.parametrize("requests", [0, 4])
def test_looking_ahead_pauses_where_it_costs_time_each_time_for_longer(requests: int) -> None:
    """Also if all that it does is to read prompts that take many steps."""
    drafts, pauses, steps = Drafts(100, ANY, EngineStats()), [], 0
    sampled = silent(drafts, requests)
    while len(pauses) < 9:
        drafts._spent = 0.0 if drafts._pause else 0.05  # of a step of 1 second: nothing is ever accepted
        drafts.learn(sampled, StepWork(requests, 0, 0, draws=requests), 1 + drafts._spent)
        steps += 1
        if drafts._pause and (not pauses or steps > pauses[-1][0] + pauses[-1][1]):
            pauses.append((steps, drafts._pause))
    assert [length for _, length in pauses] == [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert drafts._stats.seconds_saved == pytest.approx(-0.05 * 32 * 9, rel=0.05)


@pytest.mark.parametrize(
    ("gain", "spent", "pauses"),
    [(0.01, 0, True), (0.1, 0, False), (0.1, 0.01, False), (0.1, 0.033, True), (None, 0, False)],
)
def test_drafts_that_bring_next_to_nothing_pause_and_steps_without_any_do_not(
    gain: float | None, spent: float, pauses: bool
) -> None:
    """Every second step gains so much of a second; looking ahead takes so much of each."""
    drafts, paused = Drafts(100, ANY, EngineStats()), False
    for step in range(500):
        drafts._spent = spent
        drafted = step % 2 if gain else 0  # and drawn: of 4 requests, so that it saves a quarter of a step
        seconds = 1 + drafted * (0.25 - (gain or 0)) + spent
        work = StepWork(4, drafted, 0, draws=4 + drafted, accepted=drafted)
        drafts.learn(silent(drafts, 4), work, seconds)
        paused = paused or drafts._pause > 0
    assert paused == pauses


def test_drafts_that_pay_never_pause() -> None:
    drafts = Drafts(100, ANY, EngineStats())
    sampled = silent(drafts, 4)
    for step in range(500):
        drafts._spent = 0.05
        drafted = step % 5
        seconds = 1 + 0.01 * drafted + drafts._spent
        work = StepWork(4, drafted, 0, draws=4 + drafted, accepted=drafted // 2)
        drafts.learn(sampled, work, seconds)
        assert not drafts._pause
    # Of five steps of 4 tokens a second, two give one token more and one gives two.
    assert drafts._stats.seconds_saved == pytest.approx(100 * (2 * 0.25 + 0.5 - 0.1 - 5 * 0.05), rel=0.1)


def test_a_window_that_pays_halves_the_next_pause() -> None:
    drafts, halves = Drafts(100, ANY, EngineStats()), []
    sampled, drafts._longer_pause = silent(drafts, 4), 128
    for step in range(160):
        drafts.learn(sampled, StepWork(4, step % 2, 0, draws=4 + step % 2, accepted=step % 2), 1.0)
        if step % 32 == 31:
            halves.append(drafts._longer_pause)
    assert halves == [64, 32, 32, 32, 32]


def test_those_that_draw_from_what_is_known_have_a_price_of_their_own() -> None:
    """Nothing is computed for them but logits, so rows must not look cheaper for it."""
    drafts, rng = Drafts(100, ANY, EngineStats()), np.random.default_rng(0)
    for _ in range(600):
        rows, known = int(rng.integers(1, 9)), int(rng.integers(0, 30))
        seconds = 0.04 + 0.002 * rows + 0.0003 * known
        drafts.learn(silent(drafts, rows + known), StepWork(rows, 0, 0, draws=rows + known), seconds)
    assert drafts._times.of(8) == pytest.approx(0.056, rel=0.02)
    assert drafts._times.of(4, others=20) == pytest.approx(0.054, rel=0.02)


def test_times_follow_a_machine_that_becomes_slower_or_faster() -> None:
    times = StepTimes()
    for factor in (1.0, 3.0, 0.5):
        for step in range(600):
            rows = (8, 12, 32)[step % 3]
            times.learn(rows, 0, factor * (0.04 + 0.002 * rows))
            assert all(times.of(rows) > 0 for rows in range(1, 100))
        assert times.of(8) == pytest.approx(factor * 0.056, rel=0.1)


def test_a_step_that_packs_weights_brings_no_pause() -> None:
    drafts = Drafts(100, ANY, EngineStats())
    for step in range(300):
        seconds = 0.5 if step % 30 == 1 else 0.05
        drafts.learn(silent(drafts, 8), StepWork(8, 0, 0, draws=8), seconds)
        assert not drafts._pause
    assert abs(drafts._stats.seconds_saved) < 0.1
