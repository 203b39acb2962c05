"""Act-PRM's YAML (configs/trainer, with or without a file of configs/environments beside it)."""

from __future__ import annotations

from typing import Any

from silva.conversion.configs.carried import Carried, number, real

WORLDS = ("hotpotqa_mc", "browsecomp_plus_search", "longbench_v2", "textworld")
REASONS = {
    "tool_call_kwargs.*": "rendering.tools names the form of calls (docs/models.md)",
    "action_?os": "rendering.tools names the form of calls",
    "final_answer_bos": "the world says it",
    "renderer_name": "the model's own chat template",
    "log_path": "output_dir",
    "checkpoint_path": "output_dir",
    "best_metric": "held-out success, or reward",
    "loss_fn": "algorithm.loss",
    "*num_tries": "each task of a step is played by its group once",
    "system_prompt": "environments.instructions",
    "dataset_config.*": "environments.path, hub, split",
    "truncation_message": "limits end an episode without words",
    "is_async": "environments never block the loop",
    "wandb_*": "monitoring.sinks",
    "verbose": "",
    "split": "",
    "num_val_samples": "eval.tasks",
    "*": "no equal",
}


def convert(draft: Carried) -> None:
    draft.move("model.name", "model_name")
    draft.move("model.lora.rank", "lora_rank", change=number)
    draft.move("steps", "num_batches", change=number)
    draft.move("rollout.groups_per_step", "batch_size", change=number)
    draft.move("rollout.group_size", "group_size", change=number)
    draft.move("rollout.limits.max_turn_tokens", "max_tokens", change=number)
    draft.move("rollout.limits.max_turns", "max_turns", change=number)
    draft.move("rollout.sampling.temperature", "temperature", change=real)
    draft.move("trainer.optimizer.lr", "learning_rate", change=real)
    draft.set("trainer.optimizer.betas", [0.9, 0.95])
    draft.move("trainer.updates_per_step", "num_substeps", change=number)
    draft.move("eval.every", "eval_every", change=number)
    draft.move("eval.samples_per_task", "eval_group_size", change=number)
    draft.move("checkpoint.every", "save_every", change=number)
    draft.move("seed", "seed", change=number)
    if draft.take("wandb_project"):
        draft.set(
            "monitoring.sinks", [{"type": "wandb", "project": draft.take("wandb_project")}], "wandb_project"
        )
    if coefficient := real(draft.take("kl_penalty_coef", 0.0)):
        draft.set("algorithm.kl_reward_coef", coefficient, "kl_penalty_coef")
        draft.move("algorithm.kl_reward_gamma", "kl_discount_factor", change=real)
    for key in ("kl_discount_factor", "compute_post_kl"):
        draft.take(key)
    _pipeline(draft)
    _environment(draft)
    draft.rest(REASONS)


def _pipeline(draft: Carried) -> None:
    trainer = str(draft.take("trainer_name", "rl"))
    gamma = draft.take("discount_factor", 0.9)
    if trainer.startswith("act_prm"):
        draft.set("rollout.type", "thoughts", "trainer_name")
        draft.set("algorithm.type", "act_prm", "trainer_name")
        if trainer != "act_prm":
            draft.note(
                "trainer_name", "one of several stages: docs/act_prm.md says how they follow each other"
            )
        if draft.first("discount_factor"):
            draft.note("discount_factor", 'algorithm.gamma, with algorithm.credit = "turn" (docs/act_prm.md)')
    elif trainer == "rl":
        draft.set("algorithm.type", "grpo", "trainer_name")
        draft.set("algorithm.advantage", "mean")
        draft.set("algorithm.credit", "turn")
        draft.set("algorithm.gamma", real(gamma), "discount_factor")
    else:
        draft.note("trainer_name", f"{trainer}: silva sft (docs/act_prm.md, docs/sft.md)")
    if draft.take("action_prompts") is True:
        draft.note("action_prompts", "configs/act_prm/action_prompted.toml has it (docs/act_prm.md)")


def _environment(draft: Carried) -> None:
    name = str(draft.take("name", ""))
    world: dict[str, Any]
    if name in WORLDS:
        world = {"type": name}
    elif name.startswith(("act_prm", "act_lm")):
        world = {"type": "demonstrations", "hub": str(draft.take("dataset_config.path", ""))}
        draft.move("split", "dataset_config.split")
        draft.values.pop("split", None)
    else:
        world = {"type": "hotpotqa_mc"}
        draft.note(
            "name" if name else "",
            "the environment is in a file of its own: give it too, as in silva import "
            "trainer.yaml environment.yaml; hotpotqa_mc stands in its place",
        )
    for ours, theirs in (("train_size", "num_train_samples"), ("eval_size", "num_test_samples")):
        if isinstance(size := number(draft.take(theirs)), int):
            world[ours] = size
    draft.environments.append(world)
