"""Keys of other frameworks, and Silva's nearest to each: what `silva import` makes of each alone.

A test holds it to the readers of conversion/configs. docs/configuration.md has the table.
"""

from __future__ import annotations

# Silva's key, then those of TRL, verl and prime-rl; "" where there is none.
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("model.name", "model_name_or_path", "actor_rollout_ref.model.path", "model.name"),
    ("model.lora.rank", "lora_r", "actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    ("name", "run_name", "trainer.experiment_name", ""),
    ("steps", "max_steps", "trainer.total_training_steps", "max_steps"),
    ("trainer.optimizer.lr", "learning_rate", "actor_rollout_ref.actor.optim.lr", "optim.lr"),
    ("trainer.optimizer.warmup", "warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps", ""),
    ("trainer.optimizer.schedule", "lr_scheduler_type", "", ""),
    ("trainer.updates_per_step", "", "actor_rollout_ref.actor.ppo_mini_batch_size", ""),
    ("trainer.micro_batch_tokens", "", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ""),
    (
        "rollout.groups_per_step",
        "per_device_train_batch_size",
        "data.train_batch_size",
        "orchestrator.batch_size",
    ),
    (
        "rollout.group_size",
        "num_generations",
        "actor_rollout_ref.rollout.n",
        "orchestrator.rollouts_per_example",
    ),
    (
        "rollout.limits.max_turn_tokens",
        "max_completion_length",
        "data.max_response_length",
        "orchestrator.sampling.max_tokens",
    ),
    ("rollout.limits.max_episode_tokens", "max_prompt_length", "data.max_prompt_length", "seq_len"),
    ("algorithm.kl_coef", "beta", "actor_rollout_ref.actor.kl_loss_coef", ""),
    ("algorithm.type", "", "algorithm.adv_estimator", ""),
    ("eval.every", "eval_steps", "trainer.test_freq", "eval.interval"),
    ("checkpoint.every", "save_steps", "trainer.save_freq", "ckpt.interval"),
)
NEAREST = {key.rpartition(".")[2]: ours for ours, *theirs in ROWS for key in theirs if key}
"""Silva's key by the last part of another's."""
