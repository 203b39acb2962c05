"""Worker for sft.py: TRL's SFTTrainer as it comes, held before each step until it is asked for.

Runs in .peers/trl (`make peers`). Not at TRL's defaults are only what makes the work the same (rows in order,
fp32, constant learning rate, one update of the whole batch) and gradient checkpointing, which is off: it
would slow TRL down. Its data is prepared before the first step.
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
from pipe import TRAINING_ARGUMENTS, Pipe, Supervised, digest, forget_peak, peak
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

IGNORED = -100


class Turns(TrainerCallback):
    """Waits where a step begins and answers where it ends."""

    def __init__(self, pipe: Pipe):
        self._pipe, self._commands = pipe, iter(pipe)
        self._began = self._cpu = self._loss = 0.0
        self._rows: list[tuple[list[int], list[bool]]] = []

    def watch(self, trainer: SFTTrainer) -> None:
        """Note what each pass is given and what loss it has; TRL's log has four digits of the loss."""
        inner = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> torch.Tensor:
            self._rows += rows_of(inputs)
            loss = inner(model, inputs, *rest, **more)
            self._loss += float(loss)
            return loss

        trainer.training_step = training_step

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if next(self._commands, None) is None:
            sys.exit(0)
        forget_peak()
        self._loss, self._rows = 0.0, []
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._pipe.send(
            {
                "step": time.perf_counter() - self._began,
                "cpu": time.process_time() - self._cpu,
                "peak": peak(),
                "loss": self._loss,
                "digest": digest(self._rows),
            }
        )


def rows_of(inputs: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """The rows of a batch without their padding: (tokens, trained)."""
    batch = zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True)
    return [(row[mask > 0].tolist(), (kept[mask > 0] != IGNORED).tolist()) for row, kept, mask in batch]


def masked_alike(work: Supervised, tokenizer: Any) -> bool:
    """Whether the rows are what the template's own marks make of the dialogues (`assistant_only_loss`), each
    of them one row; what the template writes after the last reply is not in Silva's rows."""
    made = []
    for said in work.dialogues:
        found = tokenizer.apply_chat_template(
            said["messages"],
            tools=said["tools"],
            chat_template=work.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, mask = found["input_ids"], found["assistant_masks"]
        count = len(mask) - mask[::-1].index(1)
        made.append((tuple(tokens[:count]), tuple(map(bool, mask[:count]))))
    return set(made) >= {(tuple(tokens), tuple(mask)) for tokens, mask in work.rows}


def main() -> int:
    work, pipe = Supervised.read(sys.argv[1]), Pipe()
    torch.set_num_threads(work.threads)
    turns = Turns(pipe)
    dataset = Dataset.from_list(
        [
            {
                "input_ids": tokens,
                "labels": [token if kept else IGNORED for token, kept in zip(tokens, mask, strict=True)],
            }
            for tokens, mask in work.rows
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(work.model)
        trainer = SFTTrainer(
            model=work.model,
            args=config(work, folder),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[turns],
        )
        turns.watch(trainer)
        name = f"TRL {trl.__version__}, {'row by row' if work.row_by_row else 'padded'}"
        pipe.send(
            {
                "name": name,
                "about": f"{name}, transformers {transformers.__version__}, torch {torch.__version__}, "
                f"{torch.get_num_threads()} threads, {trainer.model.dtype}, "
                f"attention {trainer.model.config._attn_implementation}, {trainer.args.optim.value}",
                "masked_alike": work.history != "keep" or masked_alike(work, tokenizer),
            }
        )
        trainer.train()
    return 0


def config(work: Supervised, folder: str) -> SFTConfig:
    rows = len(work.rows) // work.steps
    return SFTConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        max_steps=work.steps,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=1 if work.row_by_row else rows,
        gradient_accumulation_steps=rows if work.row_by_row else 1,
        max_length=None,
        learning_rate=work.lr,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=work.max_grad_norm,
        **TRAINING_ARGUMENTS,
    )


if __name__ == "__main__":
    sys.exit(main())
