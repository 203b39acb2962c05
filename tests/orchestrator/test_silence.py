"""Whether a step taught something, and the advice where it did not."""

from dataclasses import replace

import numpy as np
import pytest
from tests.algorithms.by_hand import batch, group, one_turn, recipe, trajectory

from silva.orchestrator.buffer import Batch, Dropped, Piece
from silva.orchestrator.silence import explain, teaches
from silva.rollouts.samples import to_samples


def rows(*advantages):
    """Of 2 tokens that were shown and 2 that were sampled."""
    (sample,) = to_samples([group("g", one_turn("a", 2, 1.0))])
    return [sample.replace(advantages=np.array(values, np.float32)) for values in advantages]


@pytest.mark.parametrize(
    ("advantages", "taught"),
    [
        ([], False),
        ([[0, 0, 0, 0]], False),
        ([[1, 1, 0, 0]], False),  # of tokens that the environment wrote
        ([[0, 0, 0, -1e-30]], True),
        ([[0, 0, 0, 0], [0, 0, 2, 0]], True),
    ],
)
def test_an_advantage_of_a_trained_token_teaches(advantages, taught):
    assert teaches(recipe("grpo"), rows(*advantages)) is taught


def test_imitation_needs_no_advantage():
    assert teaches(recipe("cross_entropy"), rows([0, 0, 0, 0]))
    assert not teaches(recipe("cross_entropy"), [])


@pytest.mark.parametrize(
    ("reason", "rewards", "given", "words"),
    [
        ("zero_variance", (0.5, 0.5), {}, "all earned the same reward (0.5 on average)"),
        (
            "too_hard",
            (0.0, 0.0),
            {"difficulty_range": (0.25, 0.75)},
            "algorithm.difficulty_range = [0.25, 0.75]",
        ),
        ("failed", (), {}, "Every episode failed."),
    ],
)
def test_why_a_step_taught_nothing(reason, rewards, given, words):
    left_out = Batch(3, [Piece([], [Dropped(batch(*rewards, key=key), reason)]) for key in "gh"])
    text = explain(recipe("grpo", **given), left_out)
    assert text.startswith(f"step 3 trained nothing, since all 2 groups were left out (2 {reason}). ")
    assert words in text
    cut = replace(group("g", one_turn("a", 2, 0.0)).trajectories[0].turns[0], stop_reason="length")
    short = Batch(3, [Piece([], [Dropped(group("g", trajectory("a", (cut,))), "zero_variance")])])
    assert "100% of the replies were cut off" in explain(recipe("grpo"), short)
    kept = explain(recipe("grpo"), Batch(3, [Piece([batch(1.0, 1.0)])]))
    assert kept.startswith("step 3 trained on rows whose advantages are all 0. The episodes of a task all")
