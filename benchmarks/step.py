"""A whole GRPO step, rollout and training, against TRL's GRPOTrainer; and the RL update against plain SFT.

    make peers                                                          once: TRL in an environment of its own
    .venv/bin/python benchmarks/step.py --json step.json                SmolLM2-135M-Instruct, over an hour
    .venv/bin/python benchmarks/step.py --only "256 + 64), LoRA"        one case
    .venv/bin/python benchmarks/step.py --against exact=true            Silva otherwise, in place of TRL
    .venv/bin/python benchmarks/step.py --quick                         a tiny model, no TRL, under a minute

8 prompts x 8 samples of exactly 64 tokens, one update, fp32, no KL. Each side is a process of its own; they
take turns, so that only one computes: a warm-up step each, then pairs of steps on the same prompts. Both cut
the update by the same budget of tokens for one forward and backward pass. Ratios are medians over the pairs.
Peak memory is the largest resident set within a step, of the whole process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Row, machine, parser, peers_environment, results, write
from peers.pipe import Work
from transformers import AutoTokenizer

from silva.models.loading import PACKAGED, resolve

HERE = Path(__file__).parent / "peers"
PEER = HERE.parents[1] / ".peers" / "trl" / "bin" / "python"
MEASURES = (("step", "s"), ("rollout", "s"), ("train", "s"), ("peak", "MiB"))
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "drafts=off": {"drafts": "off"},
    "exact=true": {"exact": True},
    "dtype=bfloat16": {"dtype": "bfloat16"},
    "dtype=bfloat16,exact=true": {"dtype": "bfloat16", "exact": True},
}
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    lora: bool
    answer_tokens: int = 64
    groups: int = 8
    samples: int = 8

    @property
    def name(self) -> str:
        kind = "LoRA" if self.lora else "full"
        return f"{self.groups} x {self.samples} x ({self.prompt_tokens} + {self.answer_tokens}), {kind}"


CASES = [Case(tokens, lora) for tokens in (256, 64) for lora in (False, True)]
QUICK = [Case(64, False, 16, 4, 4)]


class Side:
    """One of the two processes: it computes only between a command and its answer."""

    def __init__(self, python: Path, script: str, work: Path, env: Mapping[str, str]):
        self._process = subprocess.Popen(
            [python, HERE / script, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.hello = self._answer()

    def ask(self, command: str) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def step(self, lengths: set[int]) -> dict[str, float]:
        """Seconds and MiB of one step.

        Raises:
            SystemExit: an answer is not as long as it should be, so the work would not be the same.
        """
        got = self.ask("step")
        if set(got["lengths"]) != lengths:
            sys.exit(f"{self.hello['name']}: got answers of {set(got['lengths'])} tokens, expected {lengths}")
        return {
            "step": got["rollout"] + got["train"],
            "rollout": got["rollout"],
            "train": got["train"],
            "peak": got["peak"] / 2**20,
            "mismatch": got.get("mismatch", 0.0),
        }

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        sys.exit(f"{self._process.args!r} ended with status {self._process.wait()}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a tiny model, small shapes, without TRL")
    options.add_argument("--against", choices=OTHERS, help="Silva with this, in place of TRL")
    options.add_argument("--pairs", type=int, default=5, help="interleaved pairs a case (default 5)")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument("--rows", type=int, default=8, help="rows of TRL's micro-batch; Silva's has as many "
                         "tokens (default 8)")  # fmt: skip
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    given = options.parse_args()
    if not given.quick and not given.against and not PEER.exists():
        sys.exit(f"{PEER} is missing: run `make peers` first, or use --quick")
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed]
    all_ = QUICK if given.quick else CASES
    cases = [case for case in all_ if given.only in case.name]
    if not cases:
        options.error(f"--only: got {given.only}, expected a part of {'; '.join(c.name for c in all_)}")
    for case in cases:
        print(f"... {case.name}", file=sys.stderr, flush=True)
        rows += measure(case, given.pairs, given.rows, given.threads, given.against, quick=given.quick)
        write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


def measure(
    case: Case, pairs: int, micro_batch_rows: int, threads: int, against: str | None, *, quick: bool
) -> list[Row]:
    folder = "tiny" if quick else resolve(PACKAGED)
    work = Work(
        model=folder,
        prompts=texts(folder, case.prompt_tokens, case.groups * (pairs + 1)),
        prompt_tokens=case.prompt_tokens,
        groups=case.groups,
        samples=case.samples,
        answer_tokens=case.answer_tokens,
        micro_batch=micro_batch_rows * (case.prompt_tokens + case.answer_tokens),
        lora=case.lora,
        threads=threads,
    )
    theirs_env = peers_environment()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "work.json"
        work.write(file)
        common = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        ours = Side(Path(sys.executable), "silva_step.py", file, {**os.environ, **common})
        sides = [ours]
        if against:
            other = Path(scratch) / "other.json"
            dataclasses.replace(work, other=against, **OTHERS[against]).write(other)
            sides.append(Side(Path(sys.executable), "silva_step.py", other, {**os.environ, **common}))
        elif not quick:
            sides.append(Side(PEER, "trl_step.py", file, {**theirs_env, **common}))
        for side in sides:
            print(f"    {side.hello['about']}", file=sys.stderr, flush=True)
            if side.hello["prompt_lengths"] != [case.prompt_tokens]:
                sys.exit(f"{side.hello['name']}: got prompts of {side.hello['prompt_lengths']} tokens, "
                         f"expected {case.prompt_tokens}")  # fmt: skip
        steps = in_turns(sides, pairs, {case.answer_tokens})
        updates = [
            (ours.ask("rl")["seconds"], ours.ask("sft")["seconds"])
            for _ in range(0 if against else pairs + 1)
        ][1:]
        for side in sides:
            side.close()
    return [*_compared(case, sides, steps), *(_against_sft(case, updates) if updates else [])]


def in_turns(sides: Sequence[Side], pairs: int, lengths: set[int]) -> list[list[dict[str, float]]]:
    """Steps of each side: a warm-up, then pairs, whose order alternates."""
    steps: list[list[dict[str, float]]] = [[] for _ in sides]
    for pair in range(pairs + 1):
        order = list(enumerate(sides))
        for index, side in order if pair % 2 else order[::-1]:
            steps[index].append(side.step(lengths))
    return [found[1:] for found in steps]


def _compared(case: Case, sides: Sequence[Side], steps: Sequence[Sequence[Mapping[str, float]]]) -> list[Row]:
    rows = []
    for metric, unit in MEASURES:
        mine = statistics.median(step[metric] for step in steps[0])
        if len(sides) == 1:
            rows.append(Row(case.name, metric, mine, unit))
            continue
        peer = sides[1].hello["name"]
        ratio = statistics.median(b[metric] / max(a[metric], 1e-9) for a, b in zip(*steps, strict=True))
        target = {"step": ">= 2" if case.prompt_tokens >= 256 else "", "peak": ">= 1"}.get(metric, "")
        target = target if "TRL" in peer else ""
        rows.append(Row(case.name, metric, mine, unit, peer, ratio, target))
        rows.append(Row(case.name, f"{metric}, {peer}", statistics.median(b[metric] for b in steps[1]), unit))
    for side, found in zip(sides, steps, strict=True):
        if "Silva" in side.hello["name"]:
            largest = max(step["mismatch"] for step in found)
            rows.append(Row(case.name, f"mismatch, {side.hello['name']}", largest, "nats"))
    return rows


def _against_sft(case: Case, updates: Sequence[tuple[float, float]]) -> list[Row]:
    seconds = statistics.median(rl for rl, _ in updates)
    ratio = statistics.median(sft / rl for rl, sft in updates)
    return [Row(case.name, "RL update", seconds, "s", "SFT update, same rows", ratio, ">= 0.9")]


def texts(folder: str, tokens: int, count: int) -> list[str]:
    """Seeded texts of exactly so many tokens: words that are one token each (bytes for the tiny model)."""
    rng = random.Random(0)
    if folder == "tiny":
        return ["".join(rng.choices("abcdefghij ", k=tokens)) for _ in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [index for index, name in enumerate(names) if re.fullmatch("Ġ[a-z]{3,}", name)]
    return [tokenizer.decode(rng.choices(words, k=tokens)) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
