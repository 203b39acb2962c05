"""Supervised training: TRL's SFTConfig and `trl sft`, verl's SFT trainers, PRIME-RL's `sft`.

What all of them have otherwise than Silva: which tokens are trained (here the replies), and rows that are
packed or padded (here they are merged into a trie).
"""

from __future__ import annotations

from typing import Any

from silva.conversion.configs import prime as prime_rl
from silva.conversion.configs import trl as grpo
from silva.conversion.configs import verl as ppo
from silva.conversion.configs.carried import Carried, Computed, number, real, steps, texts

NEVER_PADDED = "rows are merged into a trie, and there is never any padding"
TRL_REASONS = {
    "packing*": NEVER_PADDED,
    "eval_packing": NEVER_PADDED,
    "padding_free": NEVER_PADDED,
    "pad_*": NEVER_PADDED,
    "shuffle_dataset": "rows always come in a random order",
    "dataset_*": "how rows are prepared; see docs/sft.md",
    "chat_template_path": "the model's own chat template",
    **grpo.REASONS,
}
VERL_REASONS = {
    "data.custom_cls.*": "docs/sft.md has the shapes of rows",
    "data.truncation": "data.too_long",
    "data.*_batch_size*": ppo.REASONS["*micro_batch_size*"],
    "engine.*": "trainer.parallel says how a model is divided among ranks (docs/services.md)",
    "ulysses_sequence_parallel_size": ppo.REASONS["*ulysses_sequence_parallel_size"],
    "use_remove_padding": NEVER_PADDED,
    "model.*": "no equal; model has Silva's keys",
    "checkpoint.*": "a checkpoint holds all that a run goes on from",
    **ppo.REASONS,
}
PRIME_REASONS = {
    "model.*": prime_rl.REASONS["trainer.model.*"],
    "data.micro_batch_size": ppo.REASONS["*micro_batch_size*"],
    "data.*": "how rows are loaded; see docs/sft.md",
    "renderer.*": prime_rl.REASONS["orchestrator.renderer.*"],
    **prime_rl.REASONS,
}


def trl(draft: Carried) -> None:
    grpo.model(draft, ("SFTConfig",), ("SFTTrainer",))
    counted = [number(draft.take(key, usual)) for key, usual in (
        ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))]  # fmt: skip
    if all(isinstance(each, int) for each in counted):
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
        draft.set("data.dialogues_per_step", counted[0] * counted[1], *keys)
    size = draft.first("per_device_train_batch_size")
    draft.note(size, "data.dialogues_per_step is that of one device: multiply it by the number of yours")
    draft.move("data.max_tokens", "max_length", "max_seq_length", usual=1024, change=number)
    if draft.take("loss_type") == "dft":
        draft.set("data.weighting", "dft", "loss_type")
    if draft.take("assistant_only_loss") is not True and draft.take("completion_only_loss") is not True:
        draft.note(
            draft.first("assistant_only_loss", "completion_only_loss"),
            "TRL trains all of a dialogue unless its rows have a completion; here the replies are trained: "
            "data.roles names others",
        )
    grpo.optimizer(draft, 2e-5)
    if not grpo.run(draft):
        draft.move("data.epochs", "num_train_epochs", usual=3.0, change=real)
    if "eval_dataset" not in draft.given and draft.take("eval_strategy", "no") == "no":
        draft.values.pop("eval.every", None)
    draft.set("data.sources", [grpo.source(draft, "data.sources")])
    column = draft.take("dataset_text_field")
    if column and not isinstance(column, Computed):
        draft.note(
            "dataset_text_field", "rows of plain text have no equal: a row is a dialogue (docs/sft.md)"
        )
    draft.rest(TRL_REASONS)


def verl(draft: Carried) -> None:
    path = draft.move("model.name", "model.partial_pretrain", "model.path")
    if any(sign in str(path) for sign in ("$", "<")):
        draft.note(draft.first("model.partial_pretrain", "model.path"), "fill it in")
    if rank := number(draft.take("model.lora_rank")):
        draft.set("model.lora.rank", rank, "model.lora_rank")
        draft.move("model.lora.alpha", "model.lora_alpha", usual=16.0, change=real)
        if isinstance(targets := draft.take("model.target_modules"), list):
            draft.set("model.lora.targets", targets, "model.target_modules")
        elif targets not in (None, "all-linear"):
            draft.note("model.target_modules", "model.lora.targets is a list of names")
    else:
        draft.take("model.lora_alpha"), draft.take("model.target_modules")
    draft.move("trainer.gradient_checkpointing", "model.enable_gradient_checkpointing", change=bool)
    draft.move("data.dialogues_per_step", "data.train_batch_size", usual=256, change=number)
    draft.move("data.max_tokens", "data.max_length", usual=1024, change=number)
    draft.move("trainer.micro_batch_tokens", "data.max_token_len_per_gpu", change=number)
    if draft.take("data.truncation", "error") != "right":
        draft.note(
            draft.first("data.truncation"),
            'longer rows are cut at their end, or left out with data.too_long = "drop"',
        )
    draft.set("data.sources", [_verl_source(draft)])
    if held_out := _file(draft, "data.val_files"):
        draft.set("data.validation_path", held_out, "data.val_files")
    draft.move("trainer.optimizer.lr", "optim.lr", usual=1e-5, change=real)
    draft.move("trainer.optimizer.weight_decay", "optim.weight_decay", usual=0.01, change=real)
    draft.move("trainer.optimizer.betas", "optim.betas", usual=[0.9, 0.95], change=lambda b: [*map(real, b)])
    draft.move("trainer.optimizer.max_grad_norm", "optim.clip_grad", usual=1.0, change=real)
    draft.move(
        "trainer.optimizer.schedule", "optim.lr_scheduler", "optim.lr_scheduler_type", usual="cosine",
        change=lambda style: ppo.SCHEDULES.get(str(style), "cosine"),
    )  # fmt: skip
    if not draft.move("trainer.optimizer.warmup", "optim.lr_warmup_steps", change=steps):
        ratio = draft.first("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio")
        if part := real(draft.take(ratio, 0.1)):
            draft.note(ratio, f"set trainer.optimizer.warmup to {part} of all steps (its default: 0.1)")
    if not ppo.run(draft):
        draft.move("data.epochs", "trainer.total_epochs", usual=4.0, change=real)
    draft.move("seed", "trainer.seed", change=number)
    draft.move("checkpoint.keep", "trainer.max_ckpt_to_keep", change=number)
    draft.rest(VERL_REASONS)


def _verl_source(draft: Carried) -> dict[str, Any]:
    found: dict[str, Any] = {"path": _file(draft, "data.train_files") or "train.parquet"}
    messages = draft.take(draft.first("data.messages_key", "data.multiturn.messages_key"))
    tools = draft.take(draft.first("data.tools_key", "data.multiturn.tools_key"), "tools")
    if tools != "tools":
        draft.note(
            draft.first("data.tools_key", "data.multiturn.tools_key"), "the column has to be called tools"
        )
    if draft.take("data.multiturn.enable") is True or "data.messages_key" in draft.given:
        return found if messages in (None, "messages") else {**found, "prompt": messages}
    for ours, part in (("prompt", "prompt"), ("answer", "response")):
        column = draft.take(f"data.{part}_key")
        inside = texts(draft.take(f"data.{part}_dict_keys"))
        if column:
            found[ours] = ".".join([str(column), *inside[:1]])
    return found


def _file(draft: Carried, key: str) -> str:
    found = texts(draft.take(key))
    if any(sign in str(found) for sign in ("$", "<")):
        draft.note(key, "fill in the path")
    if len(found) > 1:
        draft.note(key, f"the first of {len(found)} files; each one is a [[data.sources]] table of its own")
    return found[0] if found else ""


def prime(draft: Carried) -> None:
    prime_rl.common(draft)
    draft.move("data.dialogues_per_step", "data.batch_size", usual=128, change=number)
    draft.move("data.max_tokens", "data.seq_len", "seq_len", "model.seq_len", usual=128, change=number)
    draft.note(
        "data.seq_len", "it packs rows into rows of this length; here it is the longest that one may be"
    )
    sources = [_prime_source(draft, at) for at in ("data", *prime_rl.numbered(draft, "data.source"))]
    draft.set("data.sources", [found for found in sources if found] or [{"path": "train.jsonl"}])
    for role in ("system", "user", "tool"):
        if draft.take(f"data.loss_mask.{role}") is True:
            roles = [*draft.values.get("data.roles", ["assistant"]), role]
            draft.set("data.roles", roles, f"data.loss_mask.{role}")
    draft.take("data.loss_mask.assistant")
    if "steps" not in draft.values:
        draft.set("data.epochs", 1.0)  # its default
    if draft.below("eval"):
        draft.move("eval.every", "eval.interval")
        draft.move("eval.tasks", "eval.num_examples", "eval.select.limit", change=number)
        most = ("eval.sampling.max_completion_tokens", "eval.sampling.max_tokens")
        draft.move("rollout.limits.max_turn_tokens", *most)
        prime_rl.environments(draft)
    draft.rest(PRIME_REASONS)


def _prime_source(draft: Carried, at: str) -> dict[str, Any]:
    """Of the hub, or a folder of rows; {} if none is named."""
    name = draft.take(draft.first(f"{at}.dataset", f"{at}.name"))
    if not name:
        return {}
    found = {"path" if str(name).startswith((".", "/")) else "hub": str(name)}
    for ours, theirs in (("subset", "subsets"), ("split", "splits")):
        given = texts(draft.take(draft.first(f"{at}.{ours}", f"{at}.{theirs}")))
        if given:
            found[ours] = given[0]
        if len(given) > 1:
            draft.note(f"{at}.{theirs}", "the first of them; each one is a [[data.sources]] table of its own")
    return found
