"""The keys of a loss in a configuration: `[algorithm.loss]`, and its short form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from silva.algorithms.losses import AipoLoss, CispoLoss, ClippedLoss, GspoLoss, ReinforceLoss
from silva.config.load import Resolved, load
from silva.config.saved import to_toml
from silva.errors import ConfigError
from silva.registries import REGISTRIES

WORLD = '[[environments]]\ntype = "bandit"\n'
Resolve = Callable[..., Resolved]


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    """`[algorithm]` as a file says it, then the command line."""

    def make(text: str, line: str = "", **values: Any) -> Resolved:
        (tmp_path / "a.toml").write_text(WORLD + text)
        return load(["@a.toml", *line.split()], REGISTRIES, values=values, env={}, cwd=tmp_path)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line", "loss"),
    [
        ('[algorithm]\ntype = "dapo"\n', "", ClippedLoss(clip_high=0.28)),
        # A table changes the keys it names; the others are the recipe's.
        ('[algorithm]\ntype = "dapo"\n[algorithm.loss]\nclip_low = 0.1\n', "",
         ClippedLoss(clip_low=0.1, clip_high=0.28)),
        ('[algorithm]\ntype = "dapo"\nloss = "clipped"\n', "", ClippedLoss(clip_high=0.28)),
        ('[algorithm]\ntype = "dapo"\n', "--algorithm.loss.clip_dual 3",
         ClippedLoss(clip_high=0.28, clip_dual=3.0)),
        # Another loss has its own.
        ('[algorithm]\ntype = "dapo"\nloss = "gspo"\n', "", GspoLoss()),
        ('[algorithm]\ntype = "dapo"\nloss = { type = "gspo", clip_high = 5e-4 }\n', "",
         GspoLoss(clip_high=5e-4)),
        ('[algorithm]\ntype = "dapo"\n', "--algorithm.loss reinforce", ReinforceLoss()),
        # The short form of one layer and the keys of another, or of the same one.
        ('[algorithm]\nloss = "cispo"\n', "--algorithm.loss.clip_high 4", CispoLoss(clip_high=4.0)),
        ("", "--algorithm.loss cispo --algorithm.loss.clip_high 4", CispoLoss(clip_high=4.0)),
        ("", "--algorithm.loss.clip_high 4 --algorithm.loss cispo", CispoLoss(clip_high=4.0)),
        ("", "--algorithm.loss.clip_high 4 --algorithm.loss.type cispo", CispoLoss(clip_high=4.0)),
        ('[algorithm.loss]\nclip_high = 4.0\n', "--algorithm.type cispo", CispoLoss()),
        ('[algorithm]\ntype = "aipo"\n[algorithm.loss]\nkl_tau = 0.1\n', "--algorithm.loss aipo",
         AipoLoss(kl_tau=0.1)),
    ],
)  # fmt: skip
def test_which_loss_a_configuration_means(resolve: Resolve, text: str, line: str, loss: Any) -> None:
    assert resolve(text, line).config.algorithm.loss == loss


def test_keys_from_python(resolve: Resolve) -> None:
    assert resolve("", **{"algorithm.loss": "gspo"}).config.algorithm.loss == GspoLoss()
    given = {"algorithm": {"loss": {"type": "gspo", "clip_low": 0.1}}}
    assert resolve("", **given).config.algorithm.loss == GspoLoss(clip_low=0.1)


def test_a_loss_is_saved_whole_with_its_origin(resolve: Resolve, tmp_path: Path) -> None:
    resolved = resolve('[algorithm]\ntype = "dapo"\nloss = "cispo"\n', "--algorithm.loss.clip_high 4")
    saved = to_toml(resolved)
    assert '[algorithm.loss]\ntype = "cispo"  # a.toml:5\nclip_low = 1.0\nclip_high = 4.0  # --alg' in saved
    (tmp_path / "b.toml").write_text(saved)
    assert load(["@b.toml"], REGISTRIES, env={}, cwd=tmp_path).config == resolved.config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            '[algorithm]\nloss = "clippd"\n',
            "",
            'a.toml:4: algorithm.loss.type = "clippd"\n    unknown type; did you mean "clipped"? known: ',
        ),
        (
            "",
            "--algorithm.loss ppo",
            '--algorithm.loss: algorithm.loss.type = "ppo"\n    unknown type; known: "reinforce", "clipped"',
        ),
        (
            "[algorithm.loss]\nmax_ratio = 4.0\n",
            "",
            "a.toml:4: algorithm.loss.max_ratio = 4.0\n    unknown key: it belongs to "
            'algorithm.loss.type = "aipo", and this is "clipped"',
        ),
        (
            '[algorithm]\ntype = "dapo"\nloss = "reinforce"\n',
            "--algorithm.loss.clip_high 0.5",
            "--algorithm.loss.clip_high: algorithm.loss.clip_high = 0.5\n    unknown key: it belongs to "
            'algorithm.loss.type = "clipped" or "gspo" or "cispo", and this is "reinforce"',
        ),
        (
            "[algorithm]\nclip_high = 0.28\n",
            "",
            "a.toml:4: algorithm.clip_high = 0.28\n    unknown key; did you mean algorithm.loss.clip_high?",
        ),
        (
            "[algorithm.loss]\nclip_dual = 1.2\n",
            "",
            "algorithm.loss\n    clip_dual: got 1.2, expected more than 1 + clip_high (0.2)",
        ),
        (
            "[algorithm.loss]\nclip_low = 1.1\n",
            "",
            "a.toml:4: algorithm.loss.clip_low = 1.1\n    expected a number >= 0 and <= 1",
        ),
        ("[algorithm]\nloss = 3\n", "", "a.toml:4: algorithm.loss = 3\n    expected a section (table)"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(resolve: Resolve, text: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(text, line)
    assert message in str(caught.value)


def test_a_change_of_the_loss_leaves_the_keys_of_the_old_one_behind(resolve: Resolve) -> None:
    resolved = resolve('[algorithm.loss]\ntype = "clipped"\nclip_low = 0.1\n', "--algorithm.loss aipo")
    assert resolved.config.algorithm.loss == AipoLoss()
    (note,) = resolved.notes
    assert note.startswith("--algorithm.loss changes algorithm.loss.type") and "clip_low (a.toml:5)" in note
