"""How step.py and sft.py talk to the processes they compare: one JSON object a line each way, one of them
computing.

    step.py ──"step"──> worker      resets its peak memory, computes, answers
    step.py <── {"rollout": seconds, "train": seconds, "peak": bytes, ...} ── worker

Only the standard library, for it is imported in the environments of peers too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRAINING_ARGUMENTS = {
    "use_cpu": True, "bf16": False, "seed": 0, "lr_scheduler_type": "constant", "weight_decay": 0.0,
    "gradient_checkpointing": False, "dataloader_pin_memory": False, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Of transformers, for both of TRL's trainers: what makes the work the same, and nothing written or sent."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Sent:
    """Work that a process reads from a file."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def read(cls, path: str) -> Self:
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Work(Sent):
    """What every worker does at each step: GRPO on the next `groups` prompts, one update, beta 0, fp32.

    Args:
        model: a folder of Hugging Face, or "tiny".
        prompts: texts in order, `groups` for each step; each of `prompt_tokens` tokens.
        samples: completions of each prompt, of `answer_tokens` tokens, whatever they are.
        micro_batch: tokens of one forward and backward pass.
        lora: adapters on every linear layer in place of full fine-tuning.
        threads: of torch.
        drafts, exact, dtype: `engine.drafts`, `trainer.exact` and `model.dtype` of Silva.
        other: what of them is not as usual, in words.
    """

    model: str
    prompts: Sequence[str]
    prompt_tokens: int
    groups: int
    samples: int
    answer_tokens: int
    micro_batch: int
    lora: bool
    threads: int
    drafts: str = "forest"
    exact: bool = False
    dtype: str = "float32"
    other: str = ""
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_targets: Sequence[str] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    lr: float = 1e-6
    clip: float = 0.2
    max_grad_norm: float = 1.0

    @property
    def steps(self) -> int:
        return len(self.prompts) // self.groups


@dataclass(frozen=True)
class Supervised(Sent):
    """What every worker of sft.py does: cross-entropy on the same rows in the same order, AdamW, fp32.

    Args:
        model: as in `Work`.
        template: the chat template, with marks of what assistants generate.
        history: `rendering.history` of Silva.
        dialogues: rows with `messages` and `tools`; every step takes `dialogues_per_step` of them.
        rows: what TRL trains on, in order: (tokens, trained). Silva makes its own from `dialogues`. Each step
            takes as many.
        row_by_row: TRL makes a pass of every row, in place of one of all rows, padded to the longest.
    """

    model: str
    template: str
    history: str
    dialogues: Sequence[Mapping[str, Any]]
    dialogues_per_step: int
    threads: int
    rows: Sequence[tuple[Sequence[int], Sequence[bool]]] = ()
    row_by_row: bool = False
    lr: float = 2e-5
    max_grad_norm: float = 1.0

    @property
    def steps(self) -> int:
        return len(self.dialogues) // self.dialogues_per_step


def digest(rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> str:
    """Of rows (tokens, trained): equal where both are equal in the same order."""
    plain = [([int(token) for token in tokens], [int(each) for each in mask]) for tokens, mask in rows]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def reward(tokens: Sequence[int]) -> float:
    """Share of even token ids: cheap, and different within a group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


class Pipe:
    """The worker's end. Whatever else is printed goes to standard error from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[str]:
        """Commands, until the other end closes."""
        while line := sys.stdin.readline():
            yield line.strip()

    def send(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._out, flush=True)


def forget_peak() -> None:
    """Reset the high-water mark of resident memory (Linux; elsewhere nothing happens)."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def peak() -> int:
    """Bytes of resident memory at most since `forget_peak`; 0 where the system does not say."""
    if not _STATUS.exists():
        return 0
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
