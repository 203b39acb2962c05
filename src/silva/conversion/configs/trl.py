"""TRL: a Python script with GRPOConfig and GRPOTrainer, or the YAML of `trl grpo --config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.conversion.configs.carried import Carried, Computed, Found, number, real, share, steps, texts

CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig")
TRAINERS = ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
POSITIONS = (
    ("model", "reward_funcs", "args", "train_dataset"),
    ("model", "args", "data_collator", "train_dataset"),
)
"""Arguments of trainers, those of SFTTrainer apart."""
AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
}
REASONS = {
    "dataloader_*": "how rows are loaded",
    "ddp_*": "trainer.parallel",
    "fsdp*": "trainer.parallel",
    "deepspeed": "trainer.parallel",
    "use_vllm": 'engine.type = "vllm" (docs/services.md)',
    "vllm_*": 'engine.type = "vllm" (docs/services.md)',
    "logging_*": "every step is written to metrics.jsonl",
    "log_completions": "rollouts/ has every episode",
    "push_to_hub*": "silva convert RUN --to hf --push REPO",
    "eval_strategy": "eval.every",
    "save_strategy": "checkpoint.every",
    "fp16": "model.dtype is float32 or bfloat16",
    "remove_unused_columns": "any column can be named",
    "optim": "the optimizer is AdamW",
    "bf16": "",
    "tf32": "",
    "*processing_class": "the model's own tokenizer",
    "per_device_eval_batch_size": "engine.max_concurrent",
    "load_dataset.*": "environments says what is read",
    "train_dataset": "",
    "config_file": "placement and trainer.parallel (docs/services.md)",
    "lora_target_modules": "model.lora.targets is a list of names",
    "*": "no equal",
}


def convert(draft: Carried) -> None:
    if any(key.startswith("Async") for key in draft.given):
        draft.set("rollout.max_async_level", 1)
        draft.set("placement.type", "services")
    rloo = any(key.startswith("RLOO") for key in draft.given)
    model(draft, CONFIGS, TRAINERS)
    _sizes(draft)
    _algorithm(draft, "rloo" if rloo else "grpo")
    optimizer(draft, 1e-6)
    for key in ("temperature", "top_p", "min_p"):
        draft.move(f"rollout.sampling.{key}", key, change=real)
    if isinstance(top_k := number(draft.take("top_k")), int) and top_k > 0:
        draft.set("rollout.sampling.top_k", top_k, "top_k")
    if not run(draft):
        if draft.take("num_train_epochs"):
            each = "rows of the data times this, divided by rollout.groups_per_step"
            draft.note("num_train_epochs", f"set steps: {each}")
        else:
            draft.note("", "no max_steps: TRL makes three passes over the data; set steps")
    draft.environments.append({"type": "dataset", **source(draft, "environments"), "reward": _reward(draft)})
    draft.rest(REASONS)


def model(draft: Carried, configs: Sequence[str], trainers: Sequence[str]) -> None:
    """What all trainers have of a model; arguments of these configurations and trainers lose the call's name,
    and those of other trainers are left out."""
    draft.given = _flat(draft.given, configs, trainers)
    draft.move("model.name", "model", "model_name_or_path", "model_id", change=str)
    _lora(draft)
    if draft.take("bf16") is True or str(draft.take("dtype", draft.take("torch_dtype", ""))) == "bfloat16":
        draft.set("model.dtype", "bfloat16", "bf16", "dtype", "torch_dtype")
    draft.move("trainer.gradient_checkpointing", "gradient_checkpointing", change=bool)


def _flat(given: Mapping[str, Found], configs: Sequence[str], trainers: Sequence[str]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for key, value in given.items():
        call, _, name = key.partition(".")
        if call in trainers and name.isdigit():
            name = POSITIONS[call == "SFTTrainer"][min(int(name), 3)]
        if call in (*configs, *trainers):
            if name not in ("args", "eval_dataset", "peft_config", "callbacks"):
                found.setdefault(name, value)
        elif not call.endswith(("Config", "Trainer")) or call in ("LoraConfig", "ModelConfig"):
            found[key] = value
    return found


def _lora(draft: Carried) -> None:
    for ours, names in (
        ("rank", ("LoraConfig.r", "lora_r")),
        ("alpha", ("LoraConfig.lora_alpha", "lora_alpha")),
        ("dropout", ("LoraConfig.lora_dropout", "lora_dropout")),
        ("targets", ("LoraConfig.target_modules", "lora_target_modules")),
    ):
        key = draft.first(*names)
        if not key or (key.startswith("lora") and draft.take("use_peft") is not True):
            continue
        value = draft.take(key)
        if ours == "targets" and isinstance(value, str):
            draft.note(key, "model.lora.targets is a list of names")
        elif not isinstance(value, Computed):
            draft.set(f"model.lora.{ours}", value if ours in ("rank", "targets") else real(value), key)
    for key in draft.below("LoraConfig"):
        draft.take(key)
    if draft.take("use_peft") is True and "model.lora.rank" not in draft.values:
        draft.set("model.lora.rank", 16, "use_peft")


def _sizes(draft: Carried) -> None:
    per_device = number(draft.take("per_device_train_batch_size", 8))
    accumulated = number(draft.take("gradient_accumulation_steps", 1))
    size = number(draft.take("num_generations", 8))
    per_update = (
        per_device * accumulated if isinstance(per_device, int) and isinstance(accumulated, int) else None
    )
    whole = number(draft.take("generation_batch_size"))
    updates = number(draft.take("steps_per_generation", accumulated))
    played = whole or (
        per_device * updates if isinstance(per_device, int) and isinstance(updates, int) else None
    )
    draft.set("rollout.group_size", size, "num_generations")
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size")
    draft.set("rollout.groups_per_step", share(played, size) or 1, *keys)
    draft.set("trainer.updates_per_step", share(played, per_update) or 1, "steps_per_generation")
    draft.note(
        "per_device_train_batch_size",
        "of one device: multiply rollout.groups_per_step by the number of yours",
    )
    if (again := number(draft.take("num_iterations", 1))) != 1:
        draft.note("num_iterations", f"each row is trained once a step, not {again} times")
    draft.lengths("max_prompt_length", "max_completion_length", (512, 256))


def _algorithm(draft: Carried, kind: str) -> None:
    draft.set("algorithm.type", kind)
    draft.move("algorithm.kl_coef", "beta", usual=0.0, change=real)
    loss = str(draft.take("loss_type", "dapo"))
    if loss not in AGGREGATIONS:
        draft.note("loss_type", "algorithm.loss and algorithm.aggregation (docs/algorithms.md)")
    draft.set("algorithm.aggregation", AGGREGATIONS.get(loss, "token_mean"), "loss_type")
    if str(draft.take("scale_rewards", True)).lower() in ("false", "none"):
        draft.set("algorithm.advantage", "mean", "scale_rewards")
    low = real(draft.take("epsilon", 0.2))
    draft.set("algorithm.loss.clip_low", low, "epsilon")
    draft.set("algorithm.loss.clip_high", real(draft.take("epsilon_high", low)), "epsilon_high", "epsilon")
    if draft.take("importance_sampling_level") == "sequence":
        draft.set("algorithm.loss.type", "gspo", "importance_sampling_level")
    draft.set("algorithm.max_refills", 0)
    draft.set("algorithm.drop_zero_variance", False)  # they count in its means


def optimizer(draft: Carried, usual: float) -> None:
    """`usual`: the learning rate if none is given."""
    draft.move("trainer.optimizer.lr", "learning_rate", usual=usual, change=real)
    draft.move("trainer.optimizer.weight_decay", "weight_decay", change=real)
    draft.move("trainer.optimizer.max_grad_norm", "max_grad_norm", change=real)
    betas = [draft.take(f"adam_beta{n}") for n in (1, 2)]
    if any(beta is not None for beta in betas):
        pair = [
            real(given) if given is not None else usual
            for given, usual in zip(betas, (0.9, 0.999), strict=True)
        ]
        draft.set("trainer.optimizer.betas", pair, "adam_beta1", "adam_beta2")
    schedule = str(draft.take("lr_scheduler_type", "linear"))
    if schedule.startswith("constant"):
        schedule = "constant"
    if schedule not in ("constant", "linear", "cosine"):
        draft.note("lr_scheduler_type", "trainer.optimizer.schedule is constant, linear or cosine")
        schedule = "cosine" if schedule.startswith("cosine") else "linear"
    draft.set("trainer.optimizer.schedule", schedule, "lr_scheduler_type")
    draft.move("trainer.optimizer.warmup", "warmup_steps", change=number)
    part, most = real(draft.take("warmup_ratio", 0.0)), number(draft.take("max_steps"))
    if isinstance(part, float) and 0 < part <= 1 and isinstance(most, int) and most > 0:
        draft.set("trainer.optimizer.warmup", round(part * most), "warmup_ratio")
    elif part:
        draft.note("warmup_ratio", f"set trainer.optimizer.warmup to {part} of all updates")


def run(draft: Carried) -> bool:
    """The run's own keys; whether it has a number of steps."""
    most = number(draft.take("max_steps"))
    counted = isinstance(most, int) and most > 0
    if counted:
        draft.set("steps", most, "max_steps")
        draft.take("num_train_epochs")
    name = draft.take("run_name") or draft.take("output_dir")
    if name and not isinstance(name, Computed):
        draft.set("name", Path(str(name)).name, "run_name", "output_dir")
    draft.take("output_dir")
    draft.move("seed", "seed", change=number)
    draft.move("eval.every", "eval_steps", change=steps)
    draft.move("checkpoint.every", "save_steps", change=steps)
    draft.move("checkpoint.keep", "save_total_limit", change=number)
    reports = texts(draft.take("report_to"))
    named = [each for each in ("wandb", "mlflow", "trackio") if each in reports]
    if named:
        draft.set("monitoring.sinks", [{"type": each} for each in named], "report_to")
    return counted


def source(draft: Carried, where: str) -> dict[str, Any]:
    """Where rows come from; `where`: the key of Silva that says it."""
    found: dict[str, Any] = {}
    key = draft.first("load_dataset.0", "load_dataset.path", "dataset_name")
    name = str(draft.take(key)) if key else ""
    files = draft.take("load_dataset.data_files")
    if name in ("json", "csv", "parquet") and isinstance(files, str) and not isinstance(files, Computed):
        found["path"] = files
    elif name:
        found["hub"] = name
    else:
        found["path"] = "train.jsonl"
        draft.note("", f"the data set is made by code: write its rows to a file, and set {where}.path")
    key = draft.first("load_dataset.1", "load_dataset.name", "dataset_config")
    if key and not isinstance(subset := draft.take(key), Computed):
        found["subset"] = subset
    key = draft.first("load_dataset.split", "dataset_train_split")
    if key and not isinstance(split := draft.take(key), Computed) and "[" not in str(split):
        found["split"] = split
    return found


def _reward(draft: Carried) -> str:
    key = draft.first("reward_funcs", "reward_model_name_or_path")
    value = draft.take(key) if key else None
    text = str(value[0] if isinstance(value, list) and value else value or "")
    names = [name for name in text.strip("[]").split(",") if name.strip()]
    if not names:
        draft.note("", "no reward is named: environments.reward (docs/rewards.md)")
        return "math"
    file = next((found.place.rpartition(":")[0] for k, found in draft.given.items() if k == key), "")
    if names[0].strip() in ("accuracy_reward", "think_format_reward") or not file.endswith(".py"):
        draft.note(key, "math stands in its place (docs/rewards.md)")
        return "math"
    if len(names) > 1:
        draft.note(key, 'the first of several; environments.reward with type = "weighted" adds them up')
    draft.note(
        key, "move the function to a file of its own, since a reward's file is imported: this one would train"
    )
    return f"{file}:{names[0].strip()}"
