"""RAGEN's configurations (v1): verl's, with environments by tag and sizes by group."""

from __future__ import annotations

from typing import Any

from silva.conversion.configs import verl
from silva.conversion.configs.carried import Carried, number, real, share, texts
from silva.conversion.configs.verl import ACTOR, ROLLOUT

WORLDS = {
    "sokoban": "sokoban",
    "frozen_lake": "frozen_lake",
    "bandit": "bandit",
    "countdown": "countdown",
    "metamathqa": "metamath",
    "webshop": "webshop",
    "alfworld": "alfworld",
}
TAGS = {
    "Sokoban": "sokoban",
    "FrozenLake": "frozen_lake",
    "Bandit": "bandit",
    "Countdown": "countdown",
    "MetamathQA": "metamath",
    "WebShop": "webshop",
    "Alfworld": "alfworld",
}
FIELDS = {
    "sokoban": {"dim_x": "rows", "dim_y": "columns", "num_boxes": "boxes", "search_depth": "max_moves"},
    "frozen_lake": {"size": "size", "p": "frozen", "is_slippery": "slippery", "success_rate": "success_rate"},
    "bandit": {"lo_arm_score": "safe_reward", "hi_arm_hiscore": "risky_reward"},
}
ACTED = {"sokoban", "frozen_lake", "bandit"}
"""Worlds whose turns hold several actions."""

REASONS = {
    "custom_envs.*": "",  # of environments that are not used, and what became of the others is said above
    "micro_batch_size_per_gpu": "trainer.micro_batch_tokens cuts by tokens",
    # What stands for others by ${...}:
    "ppo_mini_batch_size": "",
    "model_path": "",
    "lora.*": "",
    "ctx_manager.*": "",
    "enable_response_mask": "only replies are ever trained on",
    "system.*": "placement says what runs where",
    "seed.val": "held-out tasks are known by their content, not by a seed (docs/environments.md)",
    "es_manager.val.*": "eval.tasks and eval.samples_per_task",
    "agent_proxy.reward_normalization.*": "algorithm.advantage and advantage_over (docs/algorithms.md)",
    "agent_proxy.max_context_window": "rollout.context (docs/contexts.md)",
    "agent_proxy.use_turn_scores": 'algorithm.credit = "turn" gives each turn its own reward',
    "trainer.validation_steps": "eval.tasks counts tasks",
    "trainer.generations_to_log_to_wandb.*": "monitoring.sinks.samples",
    **verl.REASONS,
}


def convert(draft: Carried) -> None:
    verl.common(draft)
    draft.move("seed", "seed.train", change=number)
    groups = draft.move("rollout.groups_per_step", "es_manager.train.env_groups", change=number)
    size = draft.move("rollout.group_size", "es_manager.train.group_size", change=number)
    kept = real(draft.take(f"{ROLLOUT}.rollout_filter_ratio", 1.0))
    if isinstance(groups, int) and isinstance(
        size, int
    ):  # RAGEN counts trajectories, of the groups that its filter leaves
        trained = int(groups * kept) if isinstance(kept, float) and kept < 1 else groups
        updates = share(trained * size, draft.take(f"{ACTOR}.ppo_mini_batch_size"))
        draft.set("trainer.updates_per_step", updates or 1, f"{ACTOR}.ppo_mini_batch_size")
    draft.move("rollout.limits.max_turns", "agent_proxy.max_turn", change=number)
    reply = draft.move("rollout.limits.max_turn_tokens", f"{ROLLOUT}.response_length", change=number)
    draft.move("rollout.limits.max_episode_tokens", f"{ROLLOUT}.max_model_len", change=number)
    held_out = texts(draft.take("es_manager.val.env_configs.tags")) or [""]
    draft.move("eval.tasks", "es_manager.val.env_groups", change=lambda all: share(all, len(held_out)) or all)
    draft.move("eval.samples_per_task", "es_manager.val.group_size", change=number)
    if not reply:
        draft.note("", "no response_length; rollout.limits.max_turn_tokens is Silva's default")
    _algorithm(draft)
    _environments(draft)
    draft.rest(REASONS)


def _algorithm(draft: Carried) -> None:
    if draft.take("algorithm.bi_level_gae") is True:
        draft.set("algorithm.type", "bi_level_gae", "algorithm.bi_level_gae")
        draft.move("algorithm.turn_gamma", "algorithm.high_level_gamma", change=real)
    elif draft.values["algorithm.type"] == "ppo":
        draft.set("algorithm.type", "starpo", "algorithm.adv_estimator")
        draft.take("algorithm.high_level_gamma")
    if draft.take("grpo_advantage_length_weight") is True:
        draft.set("algorithm.advantage", "length_weighted", "grpo_advantage_length_weight")
    for key in ("grpo_advantage_length_weight", "use_ref"):
        draft.take(f"{ACTOR}.{key}")
    kept = real(draft.take(f"{ROLLOUT}.rollout_filter_ratio", 1.0))
    if isinstance(kept, float) and kept < 1:
        draft.set("algorithm.variance_filter.keep", "top_fraction", f"{ROLLOUT}.rollout_filter_type")
        draft.set("algorithm.variance_filter.value", kept, f"{ROLLOUT}.rollout_filter_ratio")
        if draft.take(f"{ROLLOUT}.rollout_filter_type", "std") != "std":
            draft.note(f"{ROLLOUT}.rollout_filter_type", "groups are kept by the deviation of their rewards")
    draft.take(f"{ROLLOUT}.rollout_filter_type")


def _environments(draft: Carried) -> None:
    tags = texts(draft.take("es_manager.train.env_configs.tags"))
    counts = draft.take("es_manager.train.env_configs.n_groups") or []
    held_out = texts(draft.take("es_manager.val.env_configs.tags"))
    for key in ("es_manager.val.env_configs.n_groups",):
        draft.take(key)
    several = len(tags) > 1
    for index, tag in enumerate(tags):
        weight = float(counts[index]) if several and index < len(counts) else 1.0
        _environment(draft, tag, weight, several or len(held_out) > 1)
    for tag in held_out:
        if tag not in tags:
            _environment(draft, tag, 0.0, True)


def _environment(draft: Carried, tag: str, weight: float, named: bool) -> None:
    at = f"custom_envs.{tag}"
    kind = str(draft.take(f"{at}.env_type", ""))
    world = WORLDS.get(kind) or next((ours for name, ours in TAGS.items() if name in tag), "")
    if not world:
        draft.note("es_manager.train.env_configs.tags", f"{tag}: no world of Silva is like it (silva envs)")
        return
    found: dict[str, Any] = {"type": world}
    if named:
        found |= {"name": tag, "weight": weight}
    if world in ACTED:
        if actions := number(draft.take(f"{at}.max_actions_per_traj")):
            found["max_actions"] = actions
        if per_turn := number(draft.take("agent_proxy.max_actions_per_turn")):
            found["max_actions_per_turn"] = per_turn
        found["separator"] = str(draft.take("agent_proxy.action_sep", "||"))
        found["think"] = draft.take("agent_proxy.enable_think", True) is True
    if (penalty := real(draft.take("es_manager.format_penalty"))) is not None and world != "webshop":
        found["format_penalty"] = penalty
    if draft.take(f"{at}.env_instruction"):
        draft.note(
            f"{at}.env_instruction", "the world says its own rules; environments.instructions adds to them"
        )
    for key in draft.below(f"{at}.env_config"):
        field = key.rpartition(".")[2]
        ours = FIELDS.get(world, {}).get(field)
        if ours and draft.given[key].value is not None:
            found[ours] = draft.take(key)
        else:
            draft.note(
                key, f"no equal among the keys of {world}; silva rl --help environments.{world} has them"
            )
    draft.environments.append(found)
