"""Records verl's own advantages, and RAGEN's bi-level GAE, in advantages_verl.json, to compare with.

Run once by hand, in an environment that has verl, with a copy of RAGEN's ragen/trainer/core_algos.py
(github.com/RAGEN-AI/RAGEN, commit 5eb79b8); the tests read only the file:

    pip install verl==0.9.1 && python tests/golden/advantages_verl.py RAGEN/ragen/trainer/core_algos.py

Rows of several turns, each what the environment showed and then what was sampled. `outcome` is one reward
on the last token of a row, `turn_rewards` one on the last token of each turn. All in float64, so RAGEN's
cast to float32 is turned off.
"""

from __future__ import annotations

import json
import platform
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo import core_algos

# Tokens (shown, said) of each turn of each row.
TURNS = [
    [(2, 3), (1, 2)],
    [(2, 1), (3, 4), (1, 1)],
    [(2, 5)],
    [(2, 2), (2, 2), (2, 2)],
    [(1, 1)],
    [(1, 4), (1, 3)],
    [(3, 1), (1, 1), (1, 1), (1, 6)],
]
GROUPS = [0, 1, 0, 1, 0, 1, 1]
LONGEST = max(sum(shown + said for shown, said in row) for row in TURNS)
GAE = {"gamma": 0.9, "lam": 0.8}
HIGH_LEVEL_GAMMA = 0.95


def main(ragen: Path) -> None:
    generator = random.Random(11)
    mask = torch.zeros(len(TURNS), LONGEST, dtype=torch.float64)
    turn_rewards, outcome = torch.zeros_like(mask), torch.zeros_like(mask)
    for b, row in enumerate(TURNS):
        place = 0
        for shown, said in row:
            mask[b, place + shown : place + shown + said] = 1
            place += shown + said
            turn_rewards[b, place - 1] = generator.choice([-1.0, -0.25, 0.5, 0.75, 2.0])
        outcome[b, place - 1] = generator.choice([0.0, 0.25, 1.0, 2.0])
    values = torch.tensor([[generator.uniform(-1, 1) for _ in range(LONGEST)] for _ in TURNS]).double()

    index = [str(group) for group in GROUPS]
    gae_advantages, gae_returns = core_algos.compute_gae_advantage_return(
        turn_rewards, values, mask, GAE["gamma"], GAE["lam"]
    )
    config: Any = SimpleNamespace(gamma=1.0)
    plus_plus = core_algos.compute_reinforce_plus_plus_outcome_advantage
    result = {
        "made_by": "tests/golden/advantages_verl.py",
        "command": "python tests/golden/advantages_verl.py RAGEN/ragen/trainer/core_algos.py",
        "versions": {
            "verl": verl.__version__,
            "ragen": "5eb79b82cecc31db5662ba3c96b752405692410b",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "turns": TURNS,
        "groups": GROUPS,
        "mask": mask.tolist(),
        "values": values.tolist(),
        "turn_rewards": turn_rewards.tolist(),
        "outcome": outcome.tolist(),
        "grpo": _first(core_algos.compute_grpo_outcome_advantage(outcome, mask, index)),
        "dr_grpo": _first(
            core_algos.compute_grpo_outcome_advantage(outcome, mask, index, norm_adv_by_std_in_grpo=False)
        ),
        "rloo": _first(core_algos.compute_rloo_outcome_advantage(outcome, mask, index)),
        "opo": _first(core_algos.compute_opo_outcome_advantage(outcome, mask, index)),
        "reinforce_plus_plus": _first(plus_plus(outcome, mask, config=config)),
        "reinforce_plus_plus_turns": _first(plus_plus(turn_rewards, mask, config=config)),
        "reinforce_plus_plus_baseline": _first(
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(outcome, mask, index)
        ),
        "gae": {**GAE, "advantages": gae_advantages.tolist(), "returns": gae_returns.tolist()},
        "bi_level_gae": _bi_level(ragen, turn_rewards, values, mask),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(result) + "\n")
    print(f"wrote {path} with verl {verl.__version__}", file=sys.stderr)


def _first(advantages_and_returns: tuple[torch.Tensor, torch.Tensor]) -> list[list[float]]:
    return advantages_and_returns[0].tolist()


def _bi_level(ragen: Path, rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    names: dict[str, Any] = {"torch": torch, "verl_F": verl_F}  # its verl exported them
    exec(compile(ragen.read_text(), str(ragen), "exec"), names)
    advantages, returns = names["compute_bi_level_gae_advantage_return"](
        rewards, values, mask, GAE["gamma"], GAE["lam"], HIGH_LEVEL_GAMMA
    )
    settings = {**GAE, "high_level_gamma": HIGH_LEVEL_GAMMA}
    return {**settings, "advantages": advantages.tolist(), "returns": returns.tolist()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
