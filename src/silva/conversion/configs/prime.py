"""PRIME-RL's TOML: one file for trainer, orchestrator and inference, in its shapes of 2025 and 2026."""

from __future__ import annotations

import re
from typing import Any

from silva.conversion.configs.carried import Carried, real, share

WORLDS = {
    "reverse-text": "reverse_text",
    "wordle": "wordle",
    "alphabet-sort": "alphabet_sort",
    "wiki-search": "wiki_search",
}
"""Of verifiers' environments those that are worlds of Silva too."""
FIELDS = {
    "min_turns": "min_turns",
    "max_turns": "max_turns",
    "min_names_per_turn": "min_names",
    "max_names_per_turn": "max_names",
    "similarity_power": "similarity_power",
}
"""Of alphabet-sort: its keys and those of Silva's."""
ADVANTAGES = {"default": "mean", "grpo": "mean", "max_rl": "max_rl", "rae": "running"}
"""Its algorithms that are a baseline."""
MASKED = (
    "its loss masks tokens whose probability has moved by more than 0.2 the way the advantage wants; "
    "`aipo` stops at a ratio of 8 instead (docs/algorithms.md says how a loss is code of your own)"
)
REASONS = {
    "deployment.*": "placement, trainer.ranks and trainer.parallel say what runs where (docs/cluster.md)",
    "slurm.*": "examples/cluster has files for Slurm",
    "log.*": "run.log has all messages",
    "weight_broadcast.*": "trainer.transfer says how weights reach the engine (docs/services.md)",
    "inference.*": 'engine.type = "vllm" with placement.type = "services" launches vLLM (docs/services.md)',
    "orchestrator.renderer.*": "messages are rendered with the model's own chat template",
    "orchestrator.concurrency.*": "engine.max_concurrent",
    "orchestrator.train.source.*.algo.*": "one algorithm trains all environments here",
    "orchestrator.train.source.*": "a setting of verifiers' agents: environments.config passes what its "
    "task set takes",
    "orchestrator.eval.sampling.max_completion_tokens": "rollout.limits bounds evaluations too",
    "orchestrator.eval.source.*": "as those of training",
    "*max_off_policy_steps": "with max_async_level = 0 no rollout is in flight when the policy changes",
    "trainer.model.*": "trainer.parallel, gradient_checkpointing and model.dtype (docs/services.md)",
    "*": "no equal",
}


def convert(draft: Carried) -> None:
    common(draft)
    _sizes(draft)
    _algorithm(draft)
    for ours, theirs in (
        ("rollout", "orchestrator.train.sampling"),
        ("rollout", "orchestrator.sampling"),
        ("eval", "orchestrator.eval.sampling"),
    ):
        draft.move(f"{ours}.sampling.temperature", f"{theirs}.temperature", change=real)
        draft.move(f"{ours}.sampling.top_p", f"{theirs}.top_p", change=real)
    _evaluation(draft)
    environments(draft)
    draft.rest(REASONS)


def _evaluation(draft: Carried) -> None:
    at = [f"orchestrator.eval.{place}" for place in ("source", "env")]
    sources = [source for place in at for source in numbered(draft, place)]
    if not draft.below("orchestrator.eval") and not draft.below("eval"):
        draft.set("eval.every", 0)  # it has none
        return

    def shared(ours: str, usual: int | None, *theirs: str) -> None:
        """A number that every environment may have of its own there."""
        own = [f"{source}.{key}" for source in sources for key in theirs]
        found = {str(draft.take(key)) for key in own if key in draft.given}
        if len(found) > 1:
            draft.note(draft.first(*own), f"other environments have another one; {ours} is all environments'")
        value = draft.move(ours, *own, *(f"orchestrator.eval.{key}" for key in theirs), usual=usual)
        if isinstance(value, int) and value < 1:
            del draft.values[ours]
            draft.note(draft.first(*own, *(f"orchestrator.eval.{key}" for key in theirs)), f"all: set {ours}")

    draft.move("eval.every", "eval.interval")
    shared("eval.every", draft.values.get("eval.every", 100), "interval")
    shared("eval.tasks", None, "num_examples")
    shared("eval.samples_per_task", None, "rollouts_per_example", "group_size")


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
    draft.move("checkpoint.every", "ckpt.interval", "trainer.ckpt.interval", usual=0)
    draft.move("checkpoint.keep", "ckpt.keep_last", "ckpt.keep")
    for at in ("monitors.wandb", "wandb"):
        if draft.below(at):
            project = draft.take(f"{at}.project", "silva")
            draft.set("monitoring.sinks", [{"type": "wandb", "project": str(project)}], f"{at}.project")
            draft.move("name", f"{at}.name")


def _sizes(draft: Carried) -> None:
    batch = draft.take("orchestrator.batch_size", 128)
    key = draft.first("orchestrator.group_size", "orchestrator.rollouts_per_example")
    size = draft.take(key, 1) if key else 1
    draft.set("rollout.group_size", size, key)
    draft.set("rollout.groups_per_step", share(batch, size) or 8, "orchestrator.batch_size", key)
    if draft.take("orchestrator.token_batch_size"):
        draft.note("orchestrator.token_batch_size", "a step counts groups here: set rollout.groups_per_step")
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
    levels = ("max_async_level", "async_level")
    stale = "max_off_policy_steps"
    if draft.move("rollout.max_async_level", *levels, *(f"orchestrator.{key}" for key in levels), usual=1):
        draft.move(f"rollout.{stale}", stale, f"orchestrator.{stale}", usual=8)
        draft.set("placement.type", "services")  # its trainer and its engine are processes of their own


def _algorithm(draft: Carried) -> None:
    draft.set("algorithm.type", "aipo")
    draft.set("algorithm.advantage", "mean")
    for key in ("orchestrator.advantage.type", "orchestrator.algo.type", "orchestrator.train.algo.type"):
        kind = str(draft.take(key, "default"))
        if kind == "opd":
            draft.set("algorithm.type", "distillation", key)
            draft.values.pop("algorithm.advantage", None)
            teacher = key.replace(".type", ".teacher.name")
            draft.move("algorithm.reference.name", teacher)
            draft.note(key, "the teacher is loaded by the trainer here, not asked at a base_url")
            if draft.values.get("rollout.max_async_level"):  # its loss has no ratio of its own here
                draft.set("algorithm.rollout_correction.weight", "truncate")
        elif kind in ADVANTAGES:
            if key in draft.given:
                draft.set("algorithm.advantage", ADVANTAGES[kind], key)
            if kind == "rae":
                draft.set("algorithm.drop_zero_variance", False, key)
        else:
            draft.note(key, "no equal: this trains by the mean of a group (docs/algorithms.md)")
        at = key.replace(".type", ".length_penalty")
        if draft.below(at):
            draft.take(f"{at}.type")
            draft.move("algorithm.length_penalty", f"{at}.num_output_tokens_weight", usual=0.25, change=real)
    if draft.values["algorithm.type"] == "aipo":
        draft.move("algorithm.loss.kl_tau", "trainer.loss.kl_tau", usual=1e-3, change=real)
        draft.note("trainer.loss.type" if "trainer.loss.type" in draft.given else "", MASKED)
        if "algorithm.loss.kl_tau" in draft.values:
            draft.set("algorithm.loss.type", "aipo")


def _optimizer(draft: Carried) -> None:
    for at in ("trainer.optim", "optim"):
        for ours, theirs in (("lr", "lr"), ("weight_decay", "weight_decay"), ("max_grad_norm", "max_norm")):
            draft.move(f"trainer.optimizer.{ours}", f"{at}.{theirs}", change=real)
        if draft.first(f"{at}.betas1", f"{at}.betas2"):
            betas = [real(draft.take(f"{at}.betas1", 0.9)), real(draft.take(f"{at}.betas2", 0.999))]
            draft.set("trainer.optimizer.betas", betas, f"{at}.betas1", f"{at}.betas2")
        if (kind := draft.take(f"{at}.type", "adamw")) != "adamw":
            draft.note(f"{at}.type", f"{kind}: the optimizer is AdamW")
    for ours, value in (("lr", 1e-6), ("weight_decay", 0.01)):  # its defaults
        draft.values.setdefault(f"trainer.optimizer.{ours}", value)
    for at in ("trainer.scheduler", "scheduler"):
        kind = draft.move("trainer.optimizer.schedule", f"{at}.type")
        usual = 10 if str(kind) in ("linear", "cosine") else None
        draft.move("trainer.optimizer.warmup", f"{at}.warmup_steps", usual=usual)
        if kind == "linear":
            draft.note(
                f"{at}.type", "it falls over the last decay_steps (10) alone, here from the warm-up on"
            )
        least, most = real(draft.take(f"{at}.min_lr")), draft.values["trainer.optimizer.lr"]
        if isinstance(least, float) and isinstance(most, float) and most > 0:
            draft.set("trainer.optimizer.min_lr_ratio", least / most, f"{at}.min_lr")


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
            _configured(draft, at, found[name])
    return found


def _configured(draft: Carried, at: str, found: dict[str, Any]) -> None:
    """What the task set at `at` is given: all of it for `verifiers`, and what it is called for a world."""
    parts = (f"{at}.args", f"{at}.env.taskset.args", f"{at}.env.taskset", f"{at}.taskset")
    for part in parts:
        for key in draft.below(part):
            *above, last = key.removeprefix(f"{part}.").split(".")
            if draft.used(key) or (last == "id" and not above):
                continue
            if found["type"] == "verifiers":
                table = found.setdefault("config", {})
                for name in above:
                    table = table.setdefault(name, {})
                table[last] = draft.take(key)
            elif found["type"] == "alphabet_sort" and not above and last in FIELDS:
                found[FIELDS[last]] = draft.take(key)
            else:
                draft.note(key, f"no equal among the keys of {found['type']}")
    if "config" in found:
        found["config"] = _with_lists(found["config"])


def _with_lists(value: Any) -> Any:
    """Tables whose names are numbers were lists of tables."""
    if not isinstance(value, dict):
        return value
    inner = {name: _with_lists(each) for name, each in value.items()}
    return list(inner.values()) if inner and all(name.isdigit() for name in inner) else inner
