"""Of which framework a configuration is, by keys that only it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from silva.conversion.configs.carried import Found
from silva.errors import ConfigError

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "verl-sft",
        ("model.partial_pretrain", "data.messages_key", "data.multiturn."),
    ),
    ("ragen", ("es_manager.", "agent_proxy.", "custom_envs.")),
    (
        "arpo",
        (
            "actor_rollout_ref.rollout.initial_rollouts",
            "actor_rollout_ref.rollout.branch_probability",
            "actor_rollout_ref.rollout.tools.",
        ),
    ),
    ("verl", ("actor_rollout_ref.", "data.train_batch_size", "algorithm.adv_estimator")),
    (
        "trl",
        (
            "GRPOConfig.",
            "GRPOTrainer.",
            "AsyncGRPOConfig.",
            "RLOOConfig.",
            "num_generations",
            "max_completion_length",
            "reward_funcs",
        ),
    ),
    (
        "trl-sft",
        (
            "SFTConfig.",
            "SFTTrainer.",
            "packing",
            "max_length",
            "max_seq_length",
            "completion_only_loss",
            "assistant_only_loss",
            "dataset_text_field",
        ),
    ),
    ("trl", ("model_name_or_path", "per_device_train_batch_size")),
    ("minrl", ("TrainerConfig.", "groups_per_batch")),
    ("act-prm", ("trainer_name", "num_batches", "dataset_config.", "success_rollouts_only")),
    ("prime-rl-sft", ("data.name", "data.source.", "data.batch_size")),
    ("prime-rl", ("orchestrator.", "trainer.", "inference.", "max_async_level", "seq_len")),
)
"""Framework, and beginnings of its keys; the first that fits counts. Only PRIME-RL has TOML."""


def detect(flat: Mapping[str, Found], paths: list[Path]) -> str:
    """Raises ConfigError if no sign is there."""
    toml = any(path.suffix == ".toml" for path in paths)
    for system, signs in SIGNS:
        if toml is not system.startswith("prime-rl"):
            continue
        if any(
            key == sign or (sign.endswith(".") and key.startswith(sign)) for key in flat for sign in signs
        ):
            return system
    known = ", ".join(dict.fromkeys(system for system, _ in SIGNS))
    raise ConfigError(
        f"{', '.join(map(str, paths))}: got {', '.join(flat)[:200] or 'no key'}, expected keys of {known}; "
        "--from says of which it is"
    )
