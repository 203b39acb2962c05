"""What parts cannot do together is refused with the key to change."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from silva.cli import main
from silva.commands.checks import (
    bias_notes,
    check,
    check_division,
    check_environments,
    check_parts,
    data_notes,
)
from silva.config.load import load
from silva.errors import CapabilityError, ConfigError
from silva.protocols import EngineCapabilities, TrainerCapabilities
from silva.registries import REGISTRIES

ALL = frozenset({"logprobs", "reference_logprobs", "values"})


RANKS: dict[str, Any] = {"ranks": 2, "parallel": {"pp": 2}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"type": "ppo"}}, "trainer.parallel.pp = 2 with a critic"),
        ({"trainer": RANKS | {"micro_batch_tokens": 100}}, "with rows longer than"),
        ({"trainer": RANKS | {"replay_routing": True}}, "with `trainer.replay_routing`"),
    ],
)
def test_ranks_that_do_not_go_with_the_rest_are_refused(sections: Any, words: str) -> None:
    sections = {"trainer": RANKS, "placement": {"type": "services"}, **sections}
    with pytest.raises(CapabilityError, match=re.escape(words)):
        check(resolved(**sections))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tp": 4}, "num_attention_heads = 2"),
        ({"tp": 2, "pp": 2}, "with embeddings that are the head too"),
        ({"pp": 4}, "got 4 stages for 2 layers"),
        ({"ep": 2}, "has no experts"),
        ({"cp": 4, "cp_style": "ulysses"}, "the model has 2 (num_attention_heads)"),
    ],
)
def test_ranks_that_the_model_does_not_allow_are_refused(parallel: Any, words: str) -> None:
    trainer, placement = {"ranks": 4, "parallel": parallel}, {"type": "services"}
    with pytest.raises(CapabilityError, match=re.escape(words)):
        check(resolved(model=TWO_HEADS, trainer=trainer, placement=placement))


@pytest.mark.parametrize(
    "command", [["rl"], ["rl", "--dry-run"], ["sft"], ["sft", "--dry-run"], ["trainer", "--unix=t.sock"]]
)
def test_every_command_refuses_what_the_model_does_not_allow_before_it_starts_a_part(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", None)
    model = [f"--model.{key}={value}" for key, value in TWO_HEADS.items()]
    ranks = ["--placement.type=services", "--trainer.ranks=4", "--trainer.parallel.tp=4"]
    assert main([*command, *model, *ranks, "--environments.0.type=bandit"]) == 2
    assert "trainer.parallel.tp = 4: the model has num_attention_heads = 2" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_model_that_has_no_outline_is_left_to_its_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    model = {"type": "pretrained", "name": str(tmp_path)}
    check(resolved(model=model, trainer={"ranks": 2, "parallel": {"tp": 2}}, placement={"type": "services"}))


def test_a_trainer_that_divides_nothing_has_no_division_to_refuse() -> None:
    check_division(resolved(trainer={"type": "tinker"}, engine={"type": "tinker"}), 2)


TWO_HEADS = {"type": "tiny", "layers": 2, "heads": 2, "kv_heads": 2, "width": 32}


def resolved(**sections: Any) -> Any:
    return load([], REGISTRIES, values={"environments": [{"type": "bandit"}], **sections}, env={}).config


def refused(engine: EngineCapabilities, trainer: TrainerCapabilities, **sections: Any) -> str:
    parts: Any = (SimpleNamespace(capabilities=engine), SimpleNamespace(capabilities=trainer))
    try:
        check_parts(resolved(**sections), *parts)
    except CapabilityError as error:
        return str(error)
    return ""


ENGINE = EngineCapabilities(context=64)


@pytest.mark.parametrize(
    ("engine", "trainer", "algorithm", "message"),
    [
        (ENGINE, TrainerCapabilities(ALL), {"type": "ppo"}, ""),
        (
            ENGINE,
            TrainerCapabilities(),
            {"type": "ppo"},
            "algorithm.credit: got 'gae', expected \"trajectory\" or \"turn\" (trainer.type = 'local': "
            "it has no critic)",
        ),
        (
            EngineCapabilities(context=64, loads=frozenset({"shared"})),
            TrainerCapabilities(publishes="folder"),
            {"type": "grpo"},
            "trainer.type = 'local' publishes folder weights, which engine.type = 'local' cannot load "
            "(it takes shared)",
        ),
        (
            EngineCapabilities(context=64, entropies=False),
            TrainerCapabilities(ALL),
            {"type": "grpo", "entropy_advantage": 0.5},
            "algorithm.entropy_advantage = 0.5: engine.type = 'local' gives no entropies; expected 0, or "
            "another engine",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    engine: EngineCapabilities, trainer: TrainerCapabilities, algorithm: dict[str, Any], message: str
) -> None:
    assert refused(engine, trainer, algorithm=algorithm) == message


def test_all_that_algorithms_need_is_refused_where_a_trainer_does_not_give_it() -> None:
    found = set[str]()
    recipes: tuple[Any, ...] = (
        {"type": "ppo"},
        {"kl_reward_coef": 0.1, "drop_zero_variance": False},
        {"rollout_correction": {}},
    )
    for recipe in recipes:
        found |= resolved(algorithm=recipe).algorithm.needs
        assert refused(ENGINE, TrainerCapabilities(needs=frozenset()), algorithm=recipe)
    assert found == ALL


@pytest.mark.parametrize(
    ("level", "trainer", "message"),
    [
        (0, TrainerCapabilities(ALL), ""),
        (
            1,
            TrainerCapabilities(ALL),
            "rollout.max_async_level = 1: trainer.type = 'local' shares its weights with the engine, so that "
            "they would change under rollouts in flight; expected 0",
        ),
        (1, TrainerCapabilities(ALL, publishes="folder"), ""),
    ],
)
def test_rollouts_ahead_need_weights_of_their_own(
    level: int, trainer: TrainerCapabilities, message: str
) -> None:
    assert refused(ENGINE, trainer, rollout={"max_async_level": level}) == message


def test_servers_of_the_engine_and_of_the_placement_are_not_both_taken() -> None:
    engine = {"type": "http", "urls": ["http://gpu1"]}
    config = resolved(engine=engine, placement={"type": "services"})
    with pytest.raises(CapabilityError, match=r'engine\.type = "http" with placement\.type = "services"'):
        check(config)


def test_a_strategy_that_reads_entropies_needs_them() -> None:
    blind = EngineCapabilities(context=64, entropies=False)

    def refused_with(engine: EngineCapabilities, **rollout: Any) -> str:
        return refused(engine, TrainerCapabilities(ALL), rollout={"type": "branching", **rollout})

    assert refused_with(blind) == (
        "rollout.type = 'branching' branches by entropies, which engine.type = 'local' does not give; "
        "expected rollout.entropy_weight = 0, or another engine"
    )
    assert "branches by entropies" in refused_with(blind, entropy_weight=0.0, entropy_gap_weight=0.5)
    assert refused_with(blind, entropy_weight=0.0) == refused_with(ENGINE) == ""


def test_an_engine_that_records_no_experts_is_refused_where_they_are_replayed() -> None:
    def refused_with(engine: EngineCapabilities, replays: bool) -> str:
        return refused(engine, TrainerCapabilities(ALL), **{"trainer.replay_routing": replays})

    assert refused_with(ENGINE, True).startswith(
        "trainer.replay_routing = true: engine.type = 'local' does not record which experts its tokens go to"
    )
    assert refused_with(EngineCapabilities(context=64, routes=True), True) == ""
    assert refused_with(ENGINE, False) == ""


def test_environments_that_cannot_do_what_a_strategy_needs_are_refused() -> None:
    made = []

    class Plain:
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    class Forking(Plain):
        async def fork(self, seed: int) -> Forking:
            return self

    def tasks(kind: type) -> Any:
        def environment(task: Any) -> Any:
            made.append(kind())
            return made[-1]

        return SimpleNamespace(tasks=lambda split: ["task"], environment=environment)

    def config(kind: str) -> Any:
        return resolved(rollout={"type": kind})

    asyncio.run(check_environments(config("linear"), {"plain": tasks(Plain)}))
    asyncio.run(check_environments(config("branching"), {"forking": tasks(Forking)}))
    with pytest.raises(CapabilityError) as caught:
        asyncio.run(
            check_environments(config("branching"), {"forking": tasks(Forking), "plain": tasks(Plain)})
        )
    assert str(caught.value) == (
        "rollout.type = 'branching' forks episodes, which environment 'plain' cannot: Plain needs `async def "
        'fork(self, seed)`; expected another environment, or rollout.type = "linear"'
    )
    assert [environment.closed for environment in made] == [1, 1, 1]
    with pytest.raises(
        CapabilityError, match="imitates experts, and environment 'forking' has none: Forking"
    ):
        asyncio.run(check_environments(config("thoughts"), {"forking": tasks(Forking)}))
    assert made[-1].closed == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"algorithm": {"type": "rloo"}, "rollout": {"max_async_level": 1}},
            'rollout.max_async_level = 1: algorithm.loss = "reinforce" takes stale samples for its own',
        ),
        ({"algorithm": {"type": "rloo", "rollout_correction": {}}, "rollout": {"max_async_level": 1}}, ""),
        ({"algorithm": {"type": "grpo"}, "rollout": {"max_async_level": 1, "max_off_policy_steps": 0}}, ""),
        ({"algorithm": {"type": "cross_entropy"}, "rollout": {"max_async_level": 1}}, ""),
        (
            {"rollout": {"max_off_policy_steps": 0}},
            "rollout.max_off_policy_steps = 0: with max_async_level = 0 no rollout is in flight",
        ),
        (
            {"algorithm": {"type": "arpo", "tree_credit": "hard"}},
            'algorithm.tree_credit = "hard": rollout.type = "linear" has no branches that share turns',
        ),
        ({"algorithm": {"type": "arpo", "tree_credit": "hard"}, "rollout": {"type": "branching"}}, ""),
        (
            {"algorithm": {"early_stop": 2}, "eval": {"every": 0}},
            "algorithm.early_stop = 2: counts evaluations",
        ),
        ({"algorithm": {"type": "act_prm"}, "eval": {"every": 0}}, ""),
        ({"environments": [{"type": "bandit", "weight": 0}]}, "environments: got weight = 0 in all of them"),
        ({"environments": [{"type": "bandit", "weight": 0}, {"type": "key_door"}]}, ""),
    ],
)
def test_what_does_nothing_beside_other_sections_is_refused(given: dict[str, Any], message: str) -> None:
    config = resolved(**given)
    if not message:
        return check(config)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check(config)


@pytest.mark.parametrize(
    ("recipe", "updates", "said"), [("rloo", 1, 0), ("rloo", 2, 1), ("grpo", 2, 0), ("cross_entropy", 2, 0)]
)
def test_later_updates_of_a_loss_without_a_ratio_are_told(recipe: str, updates: int, said: int) -> None:
    config = resolved(algorithm={"type": recipe}, trainer={"updates_per_step": updates})
    assert [note.partition(" is exact for the first update")[0] for note in bias_notes(config)] == (
        ['algorithm.loss = "reinforce"'] * said
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, ["[data] is not used: a data.mix above 0 adds a batch of it to every update"]),
        ({"mix": 0.1, "validation": 0.1}, []),
        (
            {"mix": 0.1, "epochs": 2.0, "weighting": "dft"},
            ["data.epochs, data.weighting: used by silva sft only, not by data.mix"],
        ),
    ],
    ids=str,
)
def test_keys_of_data_that_do_nothing_in_rl_are_said(data: dict[str, Any], said: list[str]) -> None:
    config = resolved(data={"sources": [{"path": "rows.jsonl"}], **data})
    assert data_notes(config) == said and data_notes(resolved()) == []


def test_ranks_that_cannot_be_are_refused() -> None:
    trainer: dict[str, Any] = {"ranks": 4, "parallel": {"tp": 2}}
    with pytest.raises(CapabilityError, match=r'trainer.ranks = 4 with placement.type = "local"'):
        check(resolved(trainer=trainer))
    check(resolved(trainer=trainer, placement={"type": "services"}, model={"type": "tiny"}))
    trainer["parallel"] = {"tp": 3}
    with pytest.raises(CapabilityError, match=r"got 4 ranks for .* tp = 3 .* expected 3: see trainer.ranks"):
        check(resolved(trainer=trainer, placement={"type": "services"}))
    trainer["ranks"] = 1
    for placement in ({"type": "local"}, {"type": "services"}):
        with pytest.raises(
            CapabilityError, match=r"got 1 ranks for .* tp = 3 .* expected 3: see trainer.ranks"
        ):
            check(resolved(trainer=trainer, placement=placement))
    check(resolved(trainer=trainer, placement={"type": "services", "trainer": "unix:by_torchrun.sock"}))
