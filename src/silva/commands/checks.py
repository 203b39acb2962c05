"""What cannot be done is refused before anything is loaded, or before the first step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from silva.algorithms.losses import LOSSES
from silva.config.schema import RunConfig
from silva.errors import CapabilityError, ConfigError, ModelError, SilvaError
from silva.protocols import Engine, Forkable, Scripted, TaskSet, Trainer
from silva.trainer.sharding import combinations


def check(config: RunConfig) -> None:
    """Refuse at the start what cannot be done.

    Raises:
        CapabilityError, ConfigError: with the key to change.
    """
    if not config.environments:
        raise ConfigError("environments: got [data] alone, expected at least one [[environments]] table")
    check_trained(config)
    check_engine(config)
    check_ranks(config)
    sampling = config.rollout.sampling
    for key, full in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(sampling, key) != full:
            raise CapabilityError(
                f"rollout.sampling.{key} = {getattr(sampling, key)}: training needs the full distribution "
                f"({key} = {full}), since the tokens that were cut off are not stored; eval.sampling may cut"
            )
    if sampling.temperature == 0:
        raise CapabilityError(
            "rollout.sampling.temperature = 0: greedy samples cannot be trained on, expected > 0"
        )
    if not config.algorithm.use_rewards and config.algorithm.reference is None:
        raise ConfigError(
            "algorithm.use_rewards = false without [algorithm.reference]: the policy would only be held to "
            "itself; name another model there"
        )
    if config.rollout.group_size == 1 and config.algorithm.relative:
        raise ConfigError(
            "rollout.group_size = 1 leaves nothing to compare an episode with, but advantage = "
            f'"{config.algorithm.advantage}" compares the episodes of one task, so nothing would be learned: '
            "set it to 2 or more, or choose an algorithm.type with a critic (ppo)"
        )
    _check_idle(config)


def check_trained(config: RunConfig) -> None:
    """Refuse environments of which none is trained on.

    Raises:
        ConfigError: with the key to change.
    """
    if not any(each.weight for each in config.environments):
        raise ConfigError("environments: got weight = 0 in all of them, expected one to train on")


def check_ranks(config: RunConfig) -> None:
    """Refuse ranks that are not there, cannot be divided as asked, or do not go with the rest.

    Raises:
        CapabilityError: with the key to change.
    """
    trainer, ranks = config.trainer, config.ranks
    if ranks > 1 and not config.placement.processes:
        raise CapabilityError(
            f'trainer.ranks = {ranks} with placement.type = "{config.placement.type}": ranks '
            'are processes of a trainer apart; expected placement.type = "services" or "ray"'
        )
    if hasattr(trainer, "parallel"):
        place = config.placement
        # Whoever starts a trainer elsewhere says how many ranks it has.
        if ranks > 1 or not (place.processes and not place.clustered and place.trainer):
            trainer.parallel.shape(ranks)
        long = config.rollout.limits.max_episode_tokens > trainer.micro_batch_tokens
        beside = {
            combinations.CRITIC: config.algorithm.critic,
            combinations.WALKS: long and bool(config.environments),
            combinations.REPLAY: config.replays_routing,
        }
        combinations.refuse(trainer.parallel, [name for name, holds in beside.items() if holds])
        if ranks > 1:
            check_division(config, ranks)


def check_division(config: RunConfig, ranks: int) -> None:
    """Refuse a model that cannot be divided among so many ranks, by the config.json that loading it finds.

    One that cannot be had is left to its loader, and so is a trainer that divides none.

    Raises:
        CapabilityError: with the key to change.
    """
    if not hasattr(config.trainer, "parallel"):
        return
    parallel = config.trainer.parallel
    if all(getattr(parallel, way) == 1 for way in ("cp", "tp", "pp", "ep")):
        return
    from silva.models.outline import outline  # seconds to import
    from silva.trainer.sharding.ranks import check

    with suppress(ModelError):
        model = outline(config.model)
        check(model, parallel, ranks)


def _check_idle(config: RunConfig) -> None:
    """Refuse keys that do nothing, or the wrong thing, beside keys of other sections."""
    algorithm, rollout, level = config.algorithm, config.rollout, config.rollout.max_async_level
    if level and algorithm.on_policy and algorithm.rollout_correction is None:
        raise ConfigError(
            f'rollout.max_async_level = {level}: algorithm.loss = "{algorithm.loss.type}" takes stale '
            "samples for its own; expected 0, [algorithm.rollout_correction], or a loss with a ratio"
        )
    if algorithm.tree_credit == "hard" and not rollout.forks:
        raise ConfigError(
            f'algorithm.tree_credit = "hard": rollout.type = "{rollout.type}" has no branches that share '
            'turns; expected "soft", or rollout.type = "branching"'
        )
    if rollout.max_off_policy_steps is not None and not level:
        raise ConfigError(
            f"rollout.max_off_policy_steps = {rollout.max_off_policy_steps}: with max_async_level = 0 no "
            "rollout is in flight when the policy changes; expected null"
        )
    if algorithm.early_stop != type(algorithm).model_fields["early_stop"].default and not config.eval.every:
        raise ConfigError(
            f"algorithm.early_stop = {algorithm.early_stop}: counts evaluations, of which eval.every = 0 "
            "leaves only the last; expected eval.every above 0"
        )


def bias_notes(config: RunConfig) -> list[str]:
    """What is only approximately right with these settings."""
    updates, algorithm = config.trainer.updates_per_step, config.algorithm
    if updates == 1 or not algorithm.on_policy:
        return []
    return [
        f'algorithm.loss = "{algorithm.loss.type}" is exact for the first update of a step only: the others '
        f"of trainer.updates_per_step = {updates} take samples of the policy before it for their own. Set 1, "
        "or a loss with a ratio"
    ]


def data_notes(config: RunConfig) -> list[str]:
    """Keys of [data] that have no effect in RL; a file may have them for `silva sft`."""
    data = config.data
    if data is None:
        return []
    if not data.mix:
        return ["[data] is not used: a data.mix above 0 adds a batch of it to every update"]
    fields = type(data).model_fields
    idle = [
        f"data.{key}"
        for key in ("epochs", "aggregation", "weighting", "early_stop")
        if getattr(data, key) != fields[key].default
    ]
    return [f"{', '.join(idle)}: used by silva sft only, not by data.mix"] if idle else []


def check_addresses(placement: Any) -> None:
    """Refuse an orchestrator without the addresses of its parts.

    Raises:
        ConfigError: with the keys to set.
    """
    if not placement.processes or placement.addressed().starts:
        raise ConfigError(
            'silva orchestrator: it computes nothing itself; expected placement.type = "services" with the '
            "addresses of running parts in placement.trainer and placement.inference. `silva rl` starts them"
        )


def check_engine(config: RunConfig) -> None:
    """Refuse an engine whose model cannot be trained.

    Raises:
        CapabilityError: with the reason.
    """
    engine, placement = config.engine, config.placement
    if reason := engine.only_evaluates:
        raise CapabilityError(
            f'engine.type = "{engine.type}": {reason}, so it cannot be trained; expected '
            'engine.type = "local", or `silva eval`'
        )
    if placement.processes and engine.remote and not engine.launched:
        raise CapabilityError(
            f'engine.type = "{engine.type}" with placement.type = "{placement.type}": the servers are those '
            'of placement.inference, or of `silva rl`; expected engine.type = "local" or "vllm"'
        )


def check_parts(config: RunConfig, engine: Engine, trainer: Trainer) -> None:
    """Refuse what these parts cannot do together.

    Raises:
        CapabilityError: with the key to change.
    """
    algorithm, able = config.algorithm, trainer.capabilities
    if able.publishes not in engine.capabilities.loads:
        raise CapabilityError(
            f"trainer.type = {config.trainer.type!r} publishes {able.publishes} weights, which "
            f"engine.type = {config.engine.type!r} cannot load "
            f"(it takes {_listed(engine.capabilities.loads)})"
        )
    if (level := config.rollout.max_async_level) and able.publishes == "shared":
        raise CapabilityError(
            f"rollout.max_async_level = {level}: trainer.type = {config.trainer.type!r} shares its weights "
            "with the engine, so that they would change under rollouts in flight; expected 0"
        )
    if config.rollout.overlap_training:
        _check_overlap(config, trainer)
    lacks = {name for name in (*able.needs, *LACKS) if not (name in able.needs or getattr(able, name, False))}
    if wrong := [row for row in _asked(config) if row[0] in lacks]:
        keys = (f"{key}: got {got}, expected {expected}" for _, key, got, expected in wrong)
        why = dict.fromkeys(LACKS[name] for name, *_ in wrong)
        raise CapabilityError(f"{'; '.join(keys)} (trainer.type = {config.trainer.type!r}: {'; '.join(why)})")
    if config.rollout.reads_entropies and not engine.capabilities.entropies:
        raise CapabilityError(
            f"rollout.type = {config.rollout.type!r} branches by entropies, which engine.type = "
            f"{config.engine.type!r} does not give; expected rollout.entropy_weight = 0, or another engine"
        )
    if config.replays_routing and not engine.capabilities.routes:
        raise CapabilityError(
            f"trainer.replay_routing = true: engine.type = {config.engine.type!r} does not record which "
            'experts its tokens go to; expected false, engine.type = "local", or vLLM with '
            "--enable-return-routed-experts"
        )
    if algorithm.entropy_advantage and not engine.capabilities.entropies:
        raise CapabilityError(
            f"algorithm.entropy_advantage = {algorithm.entropy_advantage}: engine.type = "
            f"{config.engine.type!r} gives no entropies; expected 0, or another engine"
        )


LACKS = {
    "values": "it has no critic",
    "logprobs": "it does not score the policy",
    "reference_logprobs": "it has no reference",
    "temperatures": "it knows the log-probabilities of no other distribution than the model's own",
    "entropies": "its losses get no entropies",
    "references": "its reference is always the model as it was loaded",
}
"""What a trainer cannot do, by the name in its capabilities or in their `needs`."""


def _asked(config: RunConfig) -> list[tuple[str, str, str, str]]:
    """What the keys that are set ask of a trainer, a name in LACKS; the key, its value, and one without."""
    recipe, usual = config.algorithm, config.rollout.sampling
    heat, top_p = usual.temperature, usual.top_p
    least = getattr(recipe.loss, "balanced_clip_min_entropy", None)
    reads = "entropies" in LOSSES[recipe.loss.type].required
    rows: list[tuple[str, str, Any, str]] = [  # what asks for nothing is false
        ("values", "algorithm.credit", recipe.critic and recipe.credit, '"trajectory" or "turn"'),
        ("logprobs", "algorithm.rollout_correction", recipe.rollout_correction is not None, "null"),
        ("reference_logprobs", "algorithm.kl_reward_coef", recipe.kl_reward_coef, "0"),
        ("temperatures", "rollout.sampling.temperature", heat != 1 and heat, "1"),
        ("temperatures", "rollout.sampling.top_p", top_p != 1 and top_p, "1"),
        ("temperatures", "rollout.sampling.top_k", usual.top_k, "0"),
        ("temperatures", "algorithm.adaptive_temperature", recipe.adaptive_temperature is not None, "null"),
        ("entropies", "algorithm.entropy_coef", recipe.entropy_coef, "0"),
        ("entropies", "algorithm.adaptive_entropy", recipe.adaptive_entropy is not None, "null"),
        ("entropies", "algorithm.loss.balanced_clip_min_entropy", least, "0 or null"),
        ("entropies", "algorithm.loss.type", reads and recipe.loss.type, "a loss without entropies"),
        ("references", "algorithm.reference", recipe.reference and recipe.reference.name, "null"),
        ("references", "algorithm.reference_refresh", recipe.reference_refresh, "0"),
        ("references", "warm_start", recipe.refers and config.warm_start is not None,
         "null, or kl_coef = 0 and kl_reward_coef = 0: the reference is the model after the warm start"),
    ]  # fmt: skip
    return [
        (name, key, "a table" if got is True else f"{got!r}", expected)
        for name, key, got, expected in rows
        if got
    ]


def _check_overlap(config: RunConfig, trainer: Trainer) -> None:
    """Refuse to begin with updates before all groups are played where they depend on all groups."""
    recipe, rollout = config.algorithm, config.rollout
    wrong = {
        f"trainer.type = {config.trainer.type!r} shares its weights with the engine": (
            trainer.capabilities.publishes == "shared"
        ),
        "trainer.updates_per_step = 1 leaves no update to begin with; expected more": (
            config.trainer.updates_per_step == 1
        ),
        f"rollout.max_async_level = {rollout.max_async_level}: expected 0": rollout.max_async_level > 0,
        f"algorithm.max_refills = {recipe.max_refills}: expected 0": recipe.max_refills > 0,
        f"algorithm.oversample = {recipe.oversample:g}: expected 1": recipe.oversample != 1,
        "algorithm.variance_filter compares all groups: expected null": recipe.variance_filter is not None,
        "algorithm.replay adds groups to a whole step: expected null": recipe.replay is not None,
        f"algorithm.whiten = {recipe.whiten!r} is over all groups: expected null": recipe.whiten is not None,
        f"algorithm.entropy_advantage = {recipe.entropy_advantage:g} compares all tokens: expected 0": (
            recipe.entropy_advantage > 0
        ),
        f'algorithm.advantage_over = {recipe.advantage_over!r}: expected "group"': (
            recipe.advantage_over != "group"
        ),
        f"algorithm.type = {recipe.type!r} scores all groups before the first update": bool(
            recipe.needs - {"reference_logprobs"}
        ),
    }
    if found := [words for words, holds in wrong.items() if holds]:
        raise CapabilityError("rollout.overlap_training = true: " + "; ".join(found))


async def check_environments(config: RunConfig, tasksets: Mapping[str, TaskSet]) -> None:
    """Refuse environments that cannot do what the strategy needs: open tools, be forked, play themselves.

    Args:
        tasksets: of environments that are trained on, by label.

    Raises:
        CapabilityError: with the keys to change.
        SilvaError: a server of tools cannot be reached, or has other tools than it had.
    """
    rollout = config.rollout
    for label in (each.label for each in config.environments if each.offers_tools and each.weight):
        episode = tasksets[label].environment(tasksets[label].tasks("train")[0])
        try:
            await episode.reset()
        except SilvaError:
            raise
        except Exception as error:
            raise CapabilityError(
                f"environment {label}: its tools cannot be opened: {type(error).__name__}: {error}"
            ) from error
        finally:
            await episode.close()
    if not (rollout.forks or rollout.imitates):
        return
    for label, taskset in tasksets.items():
        environment = taskset.environment(taskset.tasks("train")[0])
        await environment.close()
        if rollout.imitates and not isinstance(environment, Scripted):
            raise CapabilityError(
                f"rollout.type = {rollout.type!r} imitates experts, and environment {label!r} has none: "
                f"{type(environment).__name__} needs expert_reply() and random_reply(seed); expected another "
                'environment, or type = "demonstrations" with those of a file'
            )
        if rollout.forks and not isinstance(environment, Forkable):
            raise CapabilityError(
                f"rollout.type = {rollout.type!r} forks episodes, which environment {label!r} cannot: "
                f"{type(environment).__name__} needs `async def fork(self, seed)`; expected another "
                'environment, or rollout.type = "linear"'
            )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
