"""Configurations of supervised training in the shapes of other frameworks, and what becomes of their keys."""

from __future__ import annotations

from typing import Any

TRL = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

data = load_dataset("trl-lib/Capybara", split="train")
args = SFTConfig(
    output_dir="out/sft", num_train_epochs=2, max_length=2048, learning_rate=1e-4, loss_type="dft",
    per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=50,
    save_steps=100, warmup_steps=10, packing=True,
)
SFTTrainer("Qwen/Qwen3-0.6B", args, train_dataset=data, peft_config=LoraConfig(r=16, lora_alpha=32)).train()
"""
VERL = """
torchrun --standalone -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=gsm8k/train.parquet \\
    data.val_files=gsm8k/test.parquet \\
    data.prompt_key=extra_info \\
    data.response_key=extra_info \\
    data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 \\
    data.truncation=left \\
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \\
    model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear \\
    optim.lr=1e-4 optim.warmup_steps_ratio=0.05 \\
    trainer.experiment_name=gsm8k-sft trainer.test_freq=20 trainer.total_epochs=3 $@ \\
    ulysses_sequence_parallel_size=2
"""
PRIME = """
max_steps = 100
[ckpt]
interval = 50
[model]
name = "PrimeIntellect/Qwen3-0.6B"
ep = 8
[data]
seq_len = 4096
batch_size = 32
loss_mask.tool = true
[[data.source]]
dataset = "willcb/R1-reverse-wikipedia-paragraphs-v1-1000"
split = "train"
[optim]
lr = 2e-5
[eval]
interval = 25
[eval.select]
limit = 32
[eval.sampling]
max_completion_tokens = 1024
[[eval.source]]
name = "reverse-text"
env.taskset.id = "reverse-text"
[inference]
"""
CASES: dict[str, Any] = {
    "trl-sft": ({"sft.py": TRL}, {
        "name": "sft", "model.name": "Qwen/Qwen3-0.6B", "model.lora.rank": 16, "model.lora.alpha": 32.0,
        "data.sources.0.hub": "trl-lib/Capybara", "data.epochs": 2.0, "data.dialogues_per_step": 8,
        "data.max_tokens": 2048, "data.weighting": "dft", "trainer.optimizer.lr": 1e-4,
        "trainer.optimizer.schedule": "linear", "trainer.optimizer.warmup": 10, "eval.every": 50,
        "checkpoint.every": 100,
    }, ["packing", "per_device_train_batch_size", ""]),
    "verl-sft": ({"sft.sh": VERL}, {
        "name": "gsm8k-sft", "model.lora.rank": 32, "data.sources.0.path": "gsm8k/train.parquet",
        "data.sources.0.prompt": "extra_info.question", "data.sources.0.answer": "extra_info.answer",
        "data.validation_path": "gsm8k/test.parquet", "data.dialogues_per_step": 256, "data.epochs": 3.0,
        "data.max_tokens": 1024, "trainer.optimizer.lr": 1e-4, "trainer.optimizer.betas": [0.9, 0.95],
        "trainer.optimizer.schedule": "cosine", "eval.every": 20,
    }, ["data.truncation", "optim.warmup_steps_ratio", "data.micro_batch_size_per_gpu",
        "ulysses_sequence_parallel_size"]),
    "prime-rl-sft": ({"sft.toml": PRIME}, {
        "steps": 100, "model.name": "PrimeIntellect/Qwen3-0.6B", "data.dialogues_per_step": 32,
        "data.max_tokens": 4096, "data.roles": ["assistant", "tool"], "data.sources.0.split": "train",
        "data.sources.0.hub": "willcb/R1-reverse-wikipedia-paragraphs-v1-1000", "checkpoint.every": 50,
        "trainer.optimizer.lr": 2e-5, "eval.every": 25, "eval.tasks": 32,
        "environments.0.type": "reverse_text", "environments.0.weight": 0.0,
        "rollout.limits.max_turn_tokens": 1024,
    }, ["data.seq_len", "model.ep"]),
}  # fmt: skip
UNKNOWN = {
    "sft.py": ("save_steps=100,", "save_steps=100, frobnicate=7,"),
    "sft.sh": ("optim.lr=1e-4", "optim.lr=1e-4 trainer.frobnicate=7"),
    "sft.toml": ("lr = 2e-5", "lr = 2e-5\nfrobnicate = 7"),
}
