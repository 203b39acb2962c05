"""PRIME-RL's TOML: one file for trainer, orchestrator and inference, in its shapes of 2025 and 2026."""

from __future__ import annotations

import re
from typing import Any

from silva.conversion.configs.carried import Carried, number, real, share

WORLDS = {
    "reverse-text": "reverse_text",
    "wordle": "wordle",
    "alphabet-sort": "alphabet_sort",
    "wiki-search": "wiki_search",
}
"""Of verifiers' environments those that are worlds of Silva too."""
REASONS = {
    "deployment.*": "placement, trainer.ranks and trainer.parallel say what runs where (docs/cluster.md)",
    "slurm.*": "examples/cluster has files for Slurm",
    "log.*": "run.log has all messages",
    "weight_broadcast.*": "trainer.transfer says how weights reach the engine (docs/services.md)",
    "inference.*": 'engine.type = "vllm" with placement.type = "services" launches vLLM (docs/services.md)',
    "orchestrator.renderer.*": "messages are rendered with the model's own chat template",
    "orchestrator.concurrency.*": "engine.max_concurrent",
    "orchestrator.train.source.*": "a setting of verifiers' agents: environments.config passes what its "
    "task set takes",
    "orchestrator.eval.source.*": "as those of training",
    "trainer.model.*": "trainer.parallel, gradient_checkpointing and model.dtype (docs/services.md)",
    "*": "no equal",
}


def convert(draft: Carried) -> None:
    common(draft)
    _sizes(draft)
    _algorithm(draft)
    if "trainer.optimizer.lr" not in draft.values:
        draft.set("trainer.optimizer.lr", 1e-6)  # its default
    for ours, theirs in (
        ("rollout", "orchestrator.train.sampling"),
        ("rollout", "orchestrator.sampling"),
        ("eval", "orchestrator.eval.sampling"),
    ):
        draft.move(f"{ours}.sampling.temperature", f"{theirs}.temperature", change=real)
        draft.move(f"{ours}.sampling.top_p", f"{theirs}.top_p", change=real)
    draft.move("eval.every", "orchestrator.eval.interval", "eval.interval")
    draft.move("eval.tasks", "orchestrator.eval.num_examples", change=number)
    draft.move(
        "eval.samples_per_task", "orchestrator.eval.rollouts_per_example", "orchestrator.eval.group_size"
    )
    environments(draft)
    draft.rest(REASONS)


def common(draft: Carried) -> None:
    """What its trainers share: model, length, optimizer, checkpoints, and where numbers go."""
    draft.move("model.name", "model.name", "trainer.model.name", "orchestrator.model.name")
    for key in ("trainer.model.name", "orchestrator.model.name"):
        draft.take(key)
    for key in draft.below("model.lora") + draft.below("trainer.model.lora"):
        field = key.rpartition(".")[2]
        ours = {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}.get(
            field
        )
        if ours:
            draft.move(f"model.lora.{ours}", key, change=real if field == "alpha" else None)
    draft.move("steps", "max_steps", "orchestrator.max_steps", "trainer.max_steps")
    draft.move("seed", "seed", "orchestrator.seed")
    _optimizer(draft)
    draft.move("checkpoint.every", "ckpt.interval", "trainer.ckpt.interval")
    draft.move("checkpoint.keep", "ckpt.keep_last", "ckpt.keep")
    for at in ("monitors.wandb", "wandb"):
        if draft.below(at):
            project = draft.take(f"{at}.project", "silva")
            draft.set("monitoring.sinks", [{"type": "wandb", "project": str(project)}], f"{at}.project")
            draft.move("name", f"{at}.name")


def _sizes(draft: Carried) -> None:
    batch = draft.take("orchestrator.batch_size", 128)
    key = draft.first("orchestrator.group_size", "orchestrator.rollouts_per_example")
    size = draft.take(key, 16) if key else 16
    draft.set("rollout.group_size", size, key)
    draft.set("rollout.groups_per_step", share(batch, size) or 8, "orchestrator.batch_size", key)
    key = draft.first(
        "orchestrator.train.sampling.max_completion_tokens",
        "orchestrator.sampling.max_tokens",
        "orchestrator.train.sampling.max_tokens",
    )
    if key:
        draft.move("rollout.limits.max_turn_tokens", key)
    key = draft.first("seq_len", "orchestrator.seq_len", "trainer.model.seq_len")
    if key:
        draft.move("rollout.limits.max_episode_tokens", key)
        if "rollout.limits.max_turn_tokens" not in draft.values:
            draft.set(
                "rollout.limits.max_turn_tokens", draft.values["rollout.limits.max_episode_tokens"] // 2
            )
            draft.note(
                "",
                f"{key} bounds prompt and replies together; a reply gets half of it here, unless you set "
                "rollout.limits.max_turn_tokens",
            )
    key = draft.first(
        "max_async_level",
        "async_level",
        "orchestrator.max_async_level",
        "orchestrator.async_level",
        "max_off_policy_steps",
        "orchestrator.max_off_policy_steps",
    )
    if key and "off_policy" not in key:
        draft.move("rollout.max_async_level", key)
    elif key:
        draft.set("rollout.max_async_level", 1)
        draft.move("rollout.max_off_policy_steps", key)
    else:
        draft.set("rollout.max_async_level", 1)  # its default


def _algorithm(draft: Carried) -> None:
    draft.set("algorithm.type", "aipo")
    if draft.take("orchestrator.advantage.type", "default") not in ("default", "grpo"):
        draft.note("orchestrator.advantage.type", "algorithm.advantage (docs/algorithms.md)")
    draft.set("algorithm.advantage", "mean")
    draft.move("algorithm.loss.kl_tau", "trainer.loss.kl_tau", change=real)
    for key in draft.below("orchestrator.algo") + draft.below("orchestrator.train.algo"):
        draft.note(key, "algorithm.type (docs/algorithms.md names PRIME-RL's)")


def _optimizer(draft: Carried) -> None:
    for at in ("trainer.optim", "optim"):
        draft.move("trainer.optimizer.lr", f"{at}.lr", change=real)
        draft.move("trainer.optimizer.weight_decay", f"{at}.weight_decay", change=real)
        draft.move("trainer.optimizer.max_grad_norm", f"{at}.max_norm", change=real)
        if (kind := draft.take(f"{at}.type", "adamw")) != "adamw":
            draft.note(f"{at}.type", f"{kind}: the optimizer is AdamW")
    for at in ("trainer.scheduler", "scheduler"):
        draft.move("trainer.optimizer.schedule", f"{at}.type")
        draft.move("trainer.optimizer.warmup", f"{at}.warmup_steps")


def numbered(draft: Carried, place: str) -> list[str]:
    """The tables of a list."""
    return [
        f"{place}.{index}"
        for index in dict.fromkeys(key.split(".")[place.count(".") + 1] for key in draft.below(place))
    ]


def environments(draft: Carried) -> None:
    trained = _sources(draft, ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env"))
    places = ("orchestrator.eval.source", "orchestrator.eval.env", "eval.source", "eval.env")
    held_out = _sources(draft, places)
    for name, found in trained.items():
        draft.environments.append({**found, **({"name": name} if len(trained) + len(held_out) > 1 else {})})
    known = [{key: value for key, value in each.items() if key != "name"} for each in draft.environments]
    for name, found in held_out.items():
        if found in known:
            continue  # each environment holds tasks out
        named = f"{name}-eval" if name in trained else name
        draft.environments.append({**found, "name": named, "weight": 0.0})
    if not draft.environments:
        draft.note("", "no environment is named: add [[environments]] (silva envs lists them)")


def _sources(draft: Carried, places: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for place in places:
        for at in numbered(draft, place):
            task_set = draft.take(
                draft.first(f"{at}.env.taskset.id", f"{at}.taskset.id", f"{at}.id") or f"{at}.id", ""
            )
            name = str(draft.take(f"{at}.name", "") or draft.take(f"{at}.id", "") or task_set)
            world = WORLDS.get(re.sub(r"^.*/", "", str(task_set)).replace("_", "-"))
            if world:
                found[name] = {"type": world}
                draft.note(
                    f"{at}.env.taskset.id" if f"{at}.env.taskset.id" in draft.given else f"{at}.id",
                    f'Silva\'s own {world}; the original: type = "verifiers", taskset_id = "{task_set}"',
                )
            else:
                found[name] = {"type": "verifiers", "taskset_id": str(task_set)}
            config = {
                key.removeprefix(f"{part}."): draft.take(key)
                for part in (f"{at}.args", f"{at}.env.taskset.args")
                for key in draft.below(part)
            }
            if config and not world:
                found[name]["config"] = config
    return found
