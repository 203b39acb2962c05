"""Records refuse what does not hold together, in words that name the field and the numbers."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save

from silva.errors import RecordError
from silva.types import (
    Completion,
    Group,
    Message,
    Sample,
    SamplingParams,
    Segment,
    Task,
    Trajectory,
    Turn,
)
from silva.wire import codec

POLICY = Segment("policy", (5, 6), (-0.5, -1.5), versions=(3, 3))


def turn(**changes):
    return dataclasses.replace(
        Turn("t/0", (Segment("environment", (1, 2, 3)), POLICY), (), fresh=True), **changes
    )


def trajectory(**changes):
    return dataclasses.replace(Trajectory("a", (turn(),), "terminated"), **changes)


def sample(**changes):
    """Three tokens, the last two sampled."""
    fields = {
        "tokens": np.array([1, 5, 6]),
        "loss_weights": np.array([0, 1, 1], np.float32),
        "logprobs": np.array([np.nan, -0.5, -1.5]),
        "temperatures": np.ones(3),
        "versions": np.array([-1, 3, 3]),
    }
    return Sample(**(fields | changes), trajectory="a", group="g")


def refusal(make):
    with pytest.raises(RecordError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (np.array([1.0, 5.0, 6.0]), r"float64 \(3,\)"),
        (np.array([True, False, True]), r"bool \(3,\)"),
        (np.ones((3, 2), np.int64), r"int64 \(3, 2\)"),
        (np.array(5), r"int64 \(\)"),
        (np.array([], np.int64), r"int64 \(0,\)"),
    ],
)
def test_tokens_of_a_sample_are_one_or_more_integers(tokens, got):
    with pytest.raises(RecordError, match=f"sample of a: got {got}, expected token ids"):
        sample(tokens=tokens)


def test_a_number_that_came_as_an_array_is_refused():
    """It has no length, so nothing could compare it with that of the tokens."""
    line = codec.encode(sample()).partition(b"\n")[0]
    with pytest.raises(RecordError, match="Sample: got an array without a dimension, expected one or more"):
        codec.decode(Sample, line + b"\n" + save({str(i): np.array(1.0) for i in range(5)}))


def test_records_are_frozen():
    for record in (Task("a", "w", 0, {}), Message("user", "hi"), POLICY, turn(), trajectory(), sample()):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(record, dataclasses.fields(record)[0].name, None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0, expected 1 or more"),
        ({"temperature": -0.1}, "temperature: got -0.1, expected 0 (greedy) or more"),
        ({"temperature": float("nan")}, "temperature: got nan, expected 0 (greedy) or more"),
        ({"top_p": 0.0}, "top_p: got 0.0, expected 0 < top_p <= 1"),
        ({"top_p": 1.5}, "top_p: got 1.5, expected 0 < top_p <= 1"),
        ({"top_k": -1}, "top_k: got -1, expected 0 (off) or more"),
        ({"min_p": 1.0}, "min_p: got 1.0, expected 0 <= min_p < 1"),
    ],
)
def test_sampling_params(params, message):
    assert refusal(lambda: SamplingParams(**{"max_tokens": 1} | params)) == message


def test_segment_of_the_policy_has_a_logprob_and_a_version_a_token():
    assert refusal(lambda: Segment("policy", (1, 2), (-0.5,), versions=(0, 0))) == (
        "logprobs must align with tokens of Segment: got 1, expected 2"
    )
    assert refusal(lambda: Segment("policy", (1, 2), (-0.5, -0.5))) == (
        "versions must align with tokens of Segment: got 0, expected 2"
    )


def test_segment_of_an_expert_may_have_been_scored_by_a_version():
    assert refusal(lambda: Segment("expert", (1,), (-0.5,))) == (
        "versions must align with tokens of Segment: got 0, expected 1"
    )
    assert Segment("expert", (1,), (-0.5,), versions=(3,)).logprobs == (-0.5,)


def test_segment_of_the_environment_has_none():
    assert refusal(lambda: Segment("environment", (1,), (-0.5,))) == (
        "Segment: environment tokens carry no log-probabilities"
    )


@pytest.mark.parametrize("tokens, reported", [((1,), 1), ((), -1)])
def test_segment_with_reported_tokens_has_none_of_its_own(tokens, reported):
    assert Segment("environment", (), reported=2).count == 2
    assert refusal(lambda: Segment("environment", tokens, reported=reported)) == (
        f"Segment: reported: got {reported} and {len(tokens)} tokens, expected 0 or more and no tokens"
    )


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs", "entropies", "versions"])
def test_completion_has_every_number_for_every_token(field):
    one = dict.fromkeys(("logprobs", "raw_logprobs", "entropies"), (0.0, 0.0)) | {"versions": (0, 0)}
    assert Completion((1, 2), **one, stop_reason="length").tokens == (1, 2)
    assert refusal(lambda: Completion((1, 2), **(one | {field: (0,)}), stop_reason="length")) == (
        f"{field} must align with tokens of Completion: got 1, expected 2"
    )


def test_trajectory_begins_with_its_whole_context():
    assert refusal(lambda: trajectory(turns=(turn(fresh=False),))) == (
        "trajectory a: the first turn must be fresh"
    )


def test_failure_says_why():
    assert refusal(lambda: trajectory(failure="mask")) == "trajectory a: a failure needs its error"
    assert trajectory(failure="mask", error="step: ValueError").failure == "mask"


def test_raw_and_shaped_rewards_stay_apart():
    played = trajectory(rewards={"goal": 1.0, "speed": 0.5}, shaped={"format": -0.25})
    assert (played.raw_reward, played.shaped_reward) == (1.5, 1.25)
    assert (trajectory().raw_reward, trajectory().shaped_reward) == (0.0, 0.0)


def test_tokens_by_source():
    played = trajectory(turns=(turn(), turn(fresh=False)))
    assert (played.tokens(), played.tokens("policy"), played.tokens("environment")) == (10, 4, 6)


def test_failed_trajectories_are_not_scored():
    good, bad = trajectory(), trajectory(id="b", failure="redo", error="reset: OSError")
    assert Group("g", Task("a", "w", 0, {}), (good, bad)).scored == (good,)


@pytest.mark.parametrize("field", ["loss_weights", "logprobs", "temperatures", "versions", "advantages"])
def test_sample_has_every_number_for_every_token(field):
    assert refusal(lambda: sample(**{field: np.zeros(2)})) == (
        f"{field} must align with tokens of sample of a: got 2, expected 3"
    )


def test_nothing_predicts_the_first_token():
    assert refusal(lambda: sample(loss_weights=np.ones(3))) == "sample of a: the first token is never trained"


def test_sample_replace_checks_again():
    row = sample().replace(advantages=np.array([0.0, 2.0, 2.0]))
    assert (len(row), row.advantages.tolist(), row.tokens.tolist()) == (3, [0, 2, 2], [1, 5, 6])
    assert refusal(lambda: row.replace(tokens=np.arange(4))).endswith("got 3, expected 4")


def test_content_is_what_the_problem_is_not_how_it_is_drawn():
    a = Task("w/train/0", "w", 1, {"map": "SFG", "size": 3}, "right")
    b = Task("w/eval/9", "other", 2, {"size": 3, "map": "SFG"}, "right", split="eval")
    assert a.content() == b.content() and len(a.content()) == 16
    assert a.content() != dataclasses.replace(a, answer="left").content()
    assert a.content() != dataclasses.replace(a, data={"map": "SHG", "size": 3}).content()
