"""A made-up run's directory that looks like a real one, for tests and to look at the report by eye.

    python tests/monitoring/fake_run.py FOLDER [STEPS [ROLLOUTS_PER_STEP]]

writes one, with its report. Two environments, tool calls, reasoning, a rewritten context, failed and
dropped rollouts and hostile text. The same arguments give the same files.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from silva.monitoring.monitor import Monitor
from silva.monitoring.report import write_report
from silva.monitoring.settings import Monitoring
from silva.storage.rollouts import LearnedTurn, RolloutRow
from silva.storage.summary import write_summary
from silva.types import Message, Observation, Segment, ToolCall, Trajectory, Turn

HOSTILE = (
    "</script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\"> <!-- &lt;b&gt;"
)
CONFIG = """\
name = "forest_walk"  # configs/quickstart.toml:3
seed = 7  # command line: --seed
steps = 40  # configs/quickstart.toml:5
output_dir = "runs"

[model]
type = "pretrained"
name = "SmolLM2-135M-Instruct"  # configs/quickstart.toml:8
dtype = "float32"

[[environments]]
type = "frozen_lake"  # configs/quickstart.toml:12
prompt = "Answer with <answer>move</answer> # not a comment"  # configs/quickstart.toml:13

[trainer.optimizer]
lr = 2e-05  # environment: SILVA_TRAINER__OPTIMIZER__LR
betas = [0.9, 0.999]
"""


def decode(tokens: list[int] | tuple[int, ...]) -> str:
    """The byte tokenizer that the made-up token ids belong to."""
    return bytes(tokens).decode("latin-1")


def segment(text: str, rng: random.Random, version: int) -> Segment:
    """`text` as sampled tokens, one a byte, with plausible log-probabilities and entropies."""
    ids = tuple(text.encode("latin-1", "replace"))
    logprobs = tuple(-rng.expovariate(2.0) for _ in ids)
    return Segment(
        "policy",
        ids,
        logprobs=logprobs,
        raw_logprobs=tuple(p * 0.9 for p in logprobs),
        entropies=tuple(rng.expovariate(1.5) for _ in ids),
        versions=(version,) * len(ids),
        temperature=0.7,
    )


def _lake_turn(name: str, index: int, rng: random.Random, version: int, solved: bool) -> Turn:
    grid = ["P___", "_O_O", "___O", "O__G"]
    shown = "\n".join(grid if index == 0 else grid[index % 4 :] + grid[: index % 4])
    move = rng.choice(["Right", "Down", "Right || Down"])
    thought = f"The goal is below and to the right, so I go {move.lower()}."
    raw = f"<think>{thought}</think><answer>{move}</answer>"
    question = f"You stand at P, G is the goal, O a hole.\n{shown}\nWhich way?"
    return Turn(
        f"{name}/t{index}",
        (Segment("environment", tuple(question.encode())), segment(raw, rng, version)),
        (Message("user", question, id=f"u{index}"),
         Message("assistant", move, reasoning=thought, raw=raw, id=f"a{index}")),
        rewards={"success": 1.0} if solved else {},
        shaped={"format": -0.1} if index == 1 else {},
        metrics={"valid_action": 1.0},
        fresh=index == 0,
    )  # fmt: skip


def _calculator(name: str, rng: random.Random, version: int, solved: bool) -> tuple[Turn, ...]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    call = ToolCall("calculator", {"expression": f"{a} * {b}"}, id="c0")
    raw = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a} * {b}"}}}}</tool_call>'
    answer = f"{a} times {b} is {a * b if solved else a + b}."
    question = f"What is {a} * {b}? Use the calculator before you answer."
    return (
        Turn(
            f"{name}/t0",
            (Segment("environment", tuple(question.encode())), segment(raw, rng, version)),
            (Message("system", "You may call tools."), Message("user", question),
             Message("assistant", "", tool_calls=(call,), raw=raw)),
            fresh=True,
        ),
        Turn(
            f"{name}/t1",
            (Segment("environment", tuple(str(a * b).encode())), segment(answer, rng, version)),
            (Message("tool", str(a * b), name="calculator"), Message("assistant", answer, raw=answer)),
            rewards={"correct": float(solved)},
            fresh=True,
            stop_reason="stop_token" if solved else "length",
        ),
    )  # fmt: skip


def learned(turn: Turn, advantage: float) -> LearnedTurn:
    """What training knew of a turn: ratios around 1, beyond 20 % clipped; what a tool said is learned too."""
    read, said = turn.segments
    ratios = [1 + 0.3 * math.sin(place) for place in range(said.count)]
    echo = (1.0 if turn.messages[0].role == "tool" else 0.0,) * read.count + (0.0,) * said.count
    return LearnedTurn(
        turn.id,
        (advantage,),
        (1.0,),
        tuple(p + math.log(ratio) for p, ratio in zip(said.logprobs, ratios, strict=True)),
        {"echo": echo},
        tuple(abs(ratio - 1) > 0.2 for ratio in ratios),
    )


def rollout(step: int, index: int, rng: random.Random, skill: float, evaluation: bool = False) -> RolloutRow:
    """One made-up rollout; `skill` is its chance of success."""
    name = f"{'e' if evaluation else 's'}{step}r{index}"
    environment = "calculator" if index % 3 == 2 else "frozen_lake"
    solved = rng.random() < skill
    version = max(0, step if evaluation else step - index % 3)  # some of it is a version or two old
    if environment == "calculator":
        turns = _calculator(name, rng, version, solved)
    else:
        count = rng.randint(2, 5)
        turns = tuple(_lake_turn(name, i, rng, version, solved and i == count - 1) for i in range(count))
    rewards: dict[str, float] = {}
    shaped: dict[str, float] = {}
    for turn in turns:
        for total, part in ((rewards, turn.rewards), (shaped, turn.shaped)):
            for key, value in part.items():
                total[key] = total.get(key, 0.0) + value
    failed = not evaluation and index == 5 and step % 3 == 0
    dropped = not evaluation and index // 4 == step % 4 and step > 3
    status = "eval" if evaluation else "failed" if failed else "dropped" if dropped else "trained"
    reason = {"failed": "environment raised", "dropped": "zero_variance"}.get(status, "")
    trajectory = Trajectory(
        id=name,
        turns=turns,
        stop_reason="error" if failed else "terminated" if solved else "max_turns",
        rewards=rewards,
        shaped=shaped,
        metrics={"effective_actions": float(len(turns))},
        observation=Observation(messages=(Message("user", "You reached the goal." if solved else HOSTILE),)),
        failure="redo" if failed else None,
        error=f"ConnectionError: {HOSTILE}" if failed else None,
        episode=name,
    )
    task = f"{environment}/{'eval' if evaluation else 'train'}/{index // 4}"
    advantage = rng.gauss(0.0, 1.0) if status == "trained" else None
    known = () if advantage is None else tuple(learned(turn, advantage) for turn in turns)
    return RolloutRow(
        step, task, environment, task, trajectory, status, reason,  # type: ignore[arg-type]
        advantage=advantage, version=None if evaluation else step, learned=known,
    )  # fmt: skip


def evaluation(rng: random.Random, skill: float) -> dict[str, float]:
    """Metrics of one evaluation of both environments with plausible 95 % intervals."""
    metrics = {}
    for environment in ("frozen_lake", "calculator"):
        mean = min(1.0, max(0.0, skill + rng.gauss(0.0, 0.03)))
        half = 1.96 * (max(mean * (1 - mean), 0.01) / 128) ** 0.5
        key = f"eval/{environment}/success"
        metrics |= {
            key: mean,
            key + "_ci_low": max(0.0, mean - half),
            key + "_ci_high": min(1.0, mean + half),
        }
    return metrics


def step_metrics(rng: random.Random, step: int, skill: float) -> dict[str, float]:
    lake, calculator = skill + rng.gauss(0, 0.06), skill * 0.9 + rng.gauss(0, 0.06)
    return {
        "reward/raw": (lake + calculator) / 2,
        "reward/shaped": (lake + calculator) / 2 - 0.1 * (1 - skill),
        "reward/frozen_lake/raw": lake,
        "reward/calculator/raw": calculator,
        "success/frozen_lake": min(1.0, max(0.0, lake)),
        "success/calculator": min(1.0, max(0.0, calculator)),
        "train/loss": float("nan") if step == 9 else rng.gauss(0.0, 0.02),
        "train/grad_norm": 0.4 + rng.expovariate(3.0),
        "train/lr": 2e-5,
        "train/entropy": 1.6 - skill + rng.gauss(0, 0.05),
        "train/kl": 0.02 * step + rng.random() * 0.01,
        "rollout/turns": 3.2 - skill + rng.gauss(0, 0.1),
        "rollout/response_tokens": 190 - 80 * skill + rng.gauss(0, 8),
        "groups/trained": rng.randint(5, 8),
        "groups/zero_variance": rng.randint(0, 3),
        "groups/failed": 0,
        "trajectories/failed": int(step % 3 == 0),
        "perf/seconds/rollout": 6 + rng.random() * 2,
        "perf/seconds/train": 4 + rng.random(),
        "perf/seconds/publish": 0.05,
        "perf/tokens_per_second": 380 + rng.gauss(0, 20),
        "perf/peak_memory_bytes": 2.1e9,
    }


def make_run(directory: Path, steps: int = 40, rollouts: int = 16, seed: int = 0) -> Path:
    """Write a finished run of `steps` steps to `directory` through the monitor itself; no report."""
    rng = random.Random(seed)
    settings = Monitoring(terminal="off", tensorboard=False)
    evaluations = []
    with Monitor(directory, settings, name="forest_walk", total_steps=steps) as monitor:
        for step in range(steps + 1):
            skill = 0.08 + 0.84 / (1 + 2.718 ** (-10 * (step / steps - 0.45)))
            if step:
                monitor.step(step, step_metrics(rng, step, skill))
                monitor.rollouts(step, [rollout(step, i, rng, skill) for i in range(rollouts)])
            if step % max(1, steps // 8) == 0:
                evaluations.append(evaluation(rng, skill))
                monitor.step(step, evaluations[-1])
                monitor.rollouts(step, [rollout(step, i, rng, skill, evaluation=True) for i in range(6)])
        for _ in range(2):
            monitor.message(f"a stage said {HOSTILE}", "warning")
        monitor.message("run finished")
    (directory / "config.toml").write_text(CONFIG)
    write_summary(directory / "summary.json", _summary(evaluations[0], evaluations[-1], steps))
    return directory


def _summary(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, object]:
    def results(metrics: dict[str, float]) -> list[dict[str, object]]:
        keys = [key for key in metrics if key.endswith("/success")]
        return [
            {"environment": key.split("/")[1], "metric": "success", "mean": metrics[key], "n": 128,
             "ci_low": metrics[key + "_ci_low"], "ci_high": metrics[key + "_ci_high"],
             "left_out": 0, "bound_low": metrics[key], "bound_high": metrics[key]}
            for key in keys
        ]  # fmt: skip

    return {
        "eval_before": results(before),
        "eval_after": results(after),
        "steps": steps,
        "steps_trained": steps,
        "tokens_generated": 61_440,
        "tokens_in_rows": 58_112,
        "tokens_trained": 20_480,
        "seconds": {"rollout": 268.0, "train": 181.5, "eval": 62.25, "checkpoint": 4.0},
        "peak_memory_bytes": 2_254_857_830,
        "seed": 7,
        "model": "SmolLM2-135M-Instruct",
        "version": "0.1.0",
    }


if __name__ == "__main__":
    folder = make_run(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
    print(json.dumps({"report": str(write_report(folder, decode))}))
