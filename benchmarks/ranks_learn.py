"""Do ranks learn what one process learns, as services or as Ray actors? The curves, and where they part.

    .venv/bin/python benchmarks/ranks_learn.py --seeds 3                                 quickstart
    .venv/bin/python benchmarks/ranks_learn.py --seeds 3 --config FILE --model.dtype=float64 --steps=24
    .venv/bin/python benchmarks/ranks_learn.py --placements ray --ranks 1              the bits of one process

Options that are not its own are those of `silva rl`. Each seed is trained by one process and, in each of the
placements, by --ranks processes of a trainer (gloo), which add up gradients in another order, beside an
engine of its own. Compared are the curves of success on tasks that are held out, the norm of the first
gradient, the digests in the ledgers (which tell in which step a sampled token was another one for the first
time) and the weights at the end.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import CONFIGS, Curve, Row, machine, seeds_parser, series, table, write
from safetensors.numpy import load_file
from supervised_run import PLACED, SILVA

from silva.storage.ledger import history, read


@dataclass(frozen=True)
class Run:
    """`digests`: of the tokens of each group, with the step in which it was sealed."""

    curve: Curve
    norm: float
    digests: dict[str, tuple[int, str]]
    weights: dict[str, np.ndarray]


def main() -> int:
    parser = seeds_parser(__doc__, 3, "runs/ranks_learn")
    parser.add_argument("--config", type=Path, default=CONFIGS / "quickstart.toml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--placements", nargs="+", choices=PLACED, default=["services"])
    given, more = parser.parse_known_args()
    speed, words = machine()
    rows, lines = [speed], []
    for seed in given.seeds:
        started = [
            "rl",
            f"@{given.config}",
            f"--seed={seed}",
            f"--output-dir={given.output_dir}",
            *more,
        ]
        alone = run([*started, f"--name=alone_{seed}"], given.resume)
        lines.append([f"{seed}", "one process", curve(alone), "", "", "", ""])
        for placement in given.placements:
            placed = [f"--name={placement}_{seed}", f"--trainer.ranks={given.ranks}", *PLACED[placement]]
            many = run([*started, *placed], given.resume)
            gap = max(abs(a - b) for (_, a), (_, b) in zip(alone.curve, many.curve, strict=True))
            norm, far = many.norm / alone.norm - 1, apart(alone.weights, many.weights)
            name, part = f"{given.ranks} ranks, {placement}", parted(alone, many)
            lines.append([f"{seed}", name, curve(many), f"{gap:.3g}", part, f"{norm:.1e}", f"{far:.1e}"])
            rows += [
                Row(f"seed {seed}, {name}", "largest difference of held-out success", gap, "share"),
                Row(f"seed {seed}, {name}", "difference of the first gradient's norm", abs(norm), "of it"),
                Row(f"seed {seed}, {name}", "difference of the weights", far, "of their norm"),
            ]
    head = ["seed", "trained by", "held-out success", "largest difference", "first other token",
            "first gradient's norm", "weights at the end"]  # fmt: skip
    print(words, "", table(head, lines), sep="\n")
    write(rows, given.json)
    return 0


def run(argv: list[str], resume: bool) -> Run:
    """Of `silva rl`, in a process of its own."""
    options = dict(word.removeprefix("--").split("=", 1) for word in argv if word.startswith("--"))
    folder = Path(options["output-dir"], options["name"])
    if not (resume and (folder / "summary.json").exists()):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*SILVA, *argv, "--overwrite"], check=True, env=environment)
    held_out = json.loads((folder / "summary.json").read_text())["eval_after"][0]
    sealed = [record for record in history(read(folder / "ledger.jsonl")) if record.event == "sealed"]
    digests = {
        key: (record.fields["step"], group["digest"])
        for record in sealed
        for key, group in record.fields["groups"].items()
    }
    files = (folder / "weights").glob("step_*/*.safetensors")
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    curve = series(folder, f"eval/{held_out['environment']}/success")
    return Run(curve, series(folder, "train/grad_norm")[0][1], digests, weights)


def curve(run: Run) -> str:
    return ", ".join(f"{value:.1%}" for _, value in run.curve)


def parted(one: Run, other: Run) -> str:
    """The first step in which a group has other tokens."""
    steps = [
        step for key, (step, digest) in one.digests.items() if other.digests.get(key, ("", ""))[1] != digest
    ]
    return f"step {min(steps)}" if steps else "none"


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The norm of the difference over that of the weights."""
    differences = [one[name].astype(np.float64) - other[name] for name in one]
    far, size = (math.fsum(float(np.square(x, dtype=np.float64).sum()) for x in each)
                 for each in (differences, one.values()))  # fmt: skip
    return math.sqrt(far / size)


if __name__ == "__main__":
    sys.exit(main())
