"""Keys of other frameworks lead to Silva's."""

import importlib
from pathlib import Path

import pytest

from silva.cli import main
from silva.config import field_types
from silva.config.field_types import dotted
from silva.config.foreign import NEAREST, ROWS
from silva.config.schema import run_config
from silva.conversion.configs import READERS
from silva.conversion.configs.carried import Carried, Found
from silva.registries import REGISTRIES

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_nearest_key_exists_and_stands_in_the_table():
    known = {dotted(key) for key, _, _ in field_types.fields(run_config(REGISTRIES))}
    assert {row[0] for row in ROWS} <= known
    text = DOCS.read_text()
    for row in ROWS:
        assert "| " + " | ".join(f"`{key}`" if key else "" for key in row) + " |" in text


GIVEN = {"model.name": "m", "name": "n", "trainer.optimizer.schedule": "cosine", "algorithm.type": "grpo"}
BESIDE = {
    "trl": {"use_peft": True},
    "verl": {
        "actor_rollout_ref.actor.use_kl_loss": True, "data.train_batch_size": 64,
        "data.max_prompt_length": 64, "data.max_response_length": 64,
    },
    "prime-rl": {},
}  # fmt: skip
"""What some keys need to have an effect."""


def test_the_table_says_what_an_import_does():
    """Every key of the table, alone in a file, sets Silva's key that stands beside it."""
    for ours, *theirs in ROWS:
        for (system, beside), key in zip(BESIDE.items(), theirs, strict=True):
            if key:
                flat = {**beside, key: GIVEN.get(ours, 4)}
                draft = Carried({each: Found(value, "f:1") for each, value in flat.items()})
                module, _, function = READERS[system].partition(":")
                getattr(importlib.import_module(module), function)(draft)
                assert key in draft.origins.get(ours, ""), (system, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learning_rate", "1e-5"], "Silva's nearest is trainer.optimizer.lr"),
        (["--batch_size", "8"], "Silva's nearest is rollout.groups_per_step"),
        (["--num_generations", "8"], "Silva's nearest is rollout.group_size"),
        (["--trainer.learning_rate", "1e-5"], "Silva's nearest is trainer.optimizer.lr"),
        (["--algorithm.type", "GRPO"], 'did you mean "grpo"?'),
        (["--temperature", "1"], "did you mean rollout.sampling.temperature"),
    ],
)
def test_a_foreign_key_is_answered_with_silvas(capsys, arguments, words):
    assert main(["rl", "--environments.0.type=bandit", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_name_that_silva_has_is_no_foreign_one():
    own = {key[-1] for key, _, _ in field_types.fields(run_config(REGISTRIES))}
    assert {"lr", "group_size"}.isdisjoint(set(NEAREST) - own)


@pytest.mark.parametrize(("command", "meant"), [("train", "rl"), ("evl", "eval")])
def test_a_command_of_another_name_is_answered(capsys, command, meant):
    assert main([command, "@", "a.toml"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_who_serves_as_with_vllm_is_told_the_command(capsys):
    assert main(["serve", "Qwen/Qwen3-0.6B"]) == 2
    assert "expected tinker; silva inference serves OpenAI's clients" in capsys.readouterr().err
