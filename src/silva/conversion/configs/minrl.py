"""MinRL (brianfitzgerald/minRL): the fields of its `TrainerConfig`, as a class, a call or YAML."""

from __future__ import annotations

from silva.conversion.configs.carried import Carried, Found, number, real

USUAL = {"groups_per_batch": 4, "group_size": 4, "max_new_tokens": 512, "lr": 5e-6, "algorithm": "grpo",
         "task": "connections", "temperature": 1.2, "entropy_coef": 0.01, "max_grad_norm": 1.0}  # fmt: skip
ALGORITHMS = {"grpo": "grpo", "reinforce": "reinforce", "gpg": "gpg"}
REASONS = {
    "gradient_accumulation_steps": "trainer.micro_batch_tokens cuts by tokens; the gradient is the same",
    "micro_batch_size": "trainer.micro_batch_tokens cuts by tokens; the gradient is the same",
    "optimizer": "the optimizer is AdamW",
    "use_low_precision_optimizer_if_available": "moments are float32",
    "temperature_*": "algorithm.temperature, where it is adapted (docs/algorithms.md)",
    "*": "no equal",
}


def convert(draft: Carried) -> None:
    given = {key.removeprefix("TrainerConfig."): found for key, found in draft.given.items()}
    draft.given = {key: Found(value, "MinRL's default") for key, value in USUAL.items()} | given
    draft.move("model.name", "model_id")
    draft.move("rollout.groups_per_step", "groups_per_batch", change=number)
    draft.move("rollout.group_size", "group_size", change=number)
    reply = draft.move("rollout.limits.max_turn_tokens", "max_new_tokens", change=number)
    if isinstance(reply, int):
        draft.set("rollout.limits.max_episode_tokens", 4 * reply, "max_new_tokens")
    draft.move("rollout.sampling.temperature", "temperature", change=real)
    algorithm = str(draft.take("algorithm"))
    draft.set("algorithm.type", ALGORITHMS.get(algorithm, "grpo"), "algorithm")
    draft.move("algorithm.entropy_coef", "entropy_coef", change=real)
    draft.move("trainer.optimizer.lr", "lr", change=real)
    draft.move("trainer.optimizer.max_grad_norm", "max_grad_norm", change=real)
    draft.move("trainer.gradient_checkpointing", "use_gradient_checkpointing")
    draft.move("eval.every", "eval_interval", change=number)
    draft.move("eval.tasks", "eval_batch_size", change=number)
    draft.move("checkpoint.every", "ckpt_save_interval", change=number)
    project, entity = draft.take("wandb_project"), draft.take("wandb_entity")
    if project:
        sink = {"type": "wandb", "project": project, **({"entity": entity} if entity else {})}
        draft.set("monitoring.sinks", [sink], "wandb_project")
    task = str(draft.take("task"))
    if task == "zork":
        draft.environments.append({"type": "textworld"})
        draft.note("task", "zork's files are not shipped; games of TextWorld stand in their place")
    else:
        draft.environments.append({"type": task})
    draft.note("", "MinRL trains until it is stopped; set steps")
    draft.rest(REASONS)
