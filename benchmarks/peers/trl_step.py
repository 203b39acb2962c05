"""Worker for step.py: TRL's GRPOTrainer as it comes, held before each step until it is asked for.

Runs in .peers/trl (`make peers`). Not at TRL's defaults are only what makes the work the same (exact lengths,
fp32, one update of the whole batch, no weight decay) and gradient checkpointing, which is off: it would
slow TRL down.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from pipe import TRAINING_ARGUMENTS, Pipe, Work, forget_peak, peak, reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):
    """Waits where a step begins and answers where it ends; the rewards mark the end of the rollout."""

    def __init__(self, pipe: Pipe):
        self._pipe, self._commands = pipe, iter(pipe)
        self._began = self._rolled_out = 0.0
        self._lengths: list[int] = []

    def rewards(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self._lengths = [len(tokens) for tokens in completion_ids]
        found = [reward(tokens) for tokens in completion_ids]
        self._rolled_out = time.perf_counter()
        return found

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if next(self._commands, None) is None:
            sys.exit(0)
        forget_peak()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self._pipe.send(
            {
                "rollout": self._rolled_out - self._began,
                "train": now - self._rolled_out,
                "peak": peak(),
                "lengths": self._lengths,
            }
        )


def main() -> int:
    work, pipe = Work.read(sys.argv[1]), Pipe()
    torch.set_num_threads(work.threads)
    turns = Turns(pipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=turns.rewards,
            args=config(work, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts]),
            peft_config=adapters(work) if work.lora else None,
            callbacks=[turns],
        )
        encoded = trainer.processing_class(text=list(work.prompts))["input_ids"]
        name = f"TRL {trl.__version__}"
        pipe.send(
            {
                "name": name,
                "about": f"{name}, transformers {transformers.__version__}, torch {torch.__version__}, "
                f"{torch.get_num_threads()} threads, {trainer.model.dtype}, "
                f"attention {trainer.model.config._attn_implementation}, {trainer.args.optim.value}",
                "prompt_lengths": sorted({len(tokens) for tokens in encoded}),
            }
        )
        trainer.train()
    return 0


def adapters(work: Work) -> LoraConfig:
    return LoraConfig(
        r=work.lora_rank,
        lora_alpha=work.lora_alpha,
        target_modules=list(work.lora_targets),
        task_type="CAUSAL_LM",
    )


def config(work: Work, folder: str) -> GRPOConfig:
    batch = work.groups * work.samples
    rows = max(1, min(batch, work.micro_batch // (work.prompt_tokens + work.answer_tokens)))
    while batch % rows:
        rows -= 1
    return GRPOConfig(
        output_dir=folder,
        max_steps=work.steps,
        shuffle_dataset=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // rows,
        num_generations=work.samples,
        max_completion_length=work.answer_tokens,
        generation_kwargs={"min_new_tokens": work.answer_tokens},
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        epsilon=work.clip,
        loss_type="grpo",
        learning_rate=work.lr,
        max_grad_norm=work.max_grad_norm,
        **TRAINING_ARGUMENTS,
    )


if __name__ == "__main__":
    sys.exit(main())
