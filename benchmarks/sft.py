"""Supervised training on dialogues with tools, against TRL's SFTTrainer; an SFT update against an RL update.

    make peers PEERS=trl                                     once: TRL in an environment of its own
    .venv/bin/python benchmarks/sft.py --json sft.json       SmolLM2-135M-Instruct, an hour or more
    .venv/bin/python benchmarks/sft.py --only rewritten      one case
    .venv/bin/python benchmarks/sft.py --quick               a tiny model, no TRL, some minutes

20 updates in fp32 with AdamW on the same rows in the same order: each worker sends a digest of the tokens and
masks that its model was given, and they must be equal. Each side is a process of its own; they take turns, so
that only one computes. Ratios are medians over the pairs, the first step aside. Silva's step renders its
rows; TRL's were made before. The bound is what sharing can save: tokens of the rows over those of their trie.
TRL in two ways: a step's rows in one pass, padded to the longest, and row by row, which takes less memory.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Row, machine, parser, peers_environment, results, table, write
from peers.pipe import Supervised
from step import PEER, Answer, Side

from silva.models.loading import PACKAGED, resolve

SYSTEM = (
    "You are the assistant of a hardware shop. Look up prices and stock with the tools, calculate with the "
    "calculator, and answer in one short sentence. Never guess a number. If a tool gives an error, say so."
)
ITEMS = ("bolts", "brackets", "clamps", "drills", "hinges", "ladders", "lamps", "saws", "screws", "wrenches")

# ChatML with tools; {% generation %} marks what TRL trains with assistant_only_loss.
TEMPLATE = """\
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nReturn calls as JSON within <tool_call></tool_call> tags.' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[1:] %}
{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{% generation %}
{%- set content = message.content or '' %}CUT{{- content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CUT = "{%- if not loop.last %}{%- set content = content.split('</think>')[-1].lstrip() %}{%- endif %}"


@dataclass(frozen=True)
class Case:
    """Dialogues of so many questions, two replies each, with so many tools described before them.

    rewritten: thoughts come before replies, and the template takes them out of earlier turns: every reply is
        trained in a row of its own.
    """

    name: str
    dialogues: int
    questions: Sequence[int]
    tools: int
    rewritten: bool = False

    @property
    def template(self) -> str:
        return TEMPLATE.replace("CUT", CUT if self.rewritten else "")


CASES = [
    Case("one row a dialogue: 2 dialogues of 4 to 8 replies", 2, (2, 3, 4), 4),
    Case("rewritten, a row a reply: 1 dialogue of 6 replies", 1, (3,), 2, rewritten=True),
]
QUICK = [
    Case("one row a dialogue: 2 dialogues of 2 replies", 2, (1,), 1),
    Case("rewritten, a row a reply: 1 dialogue of 4 replies", 1, (2,), 1, rewritten=True),
]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a tiny model, without TRL")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument("--steps", type=int, default=20, help="updates of Silva and TRL (default 20)")
    options.add_argument(
        "--updates", type=int, default=10, help="pairs of an SFT and an RL update (default 10)"
    )
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    given = options.parse_args()
    if not given.quick and not PEER.exists():
        sys.exit(f"{PEER} is missing: run `make peers PEERS=trl` first, or use --quick")
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed]
    for case in QUICK if given.quick else CASES:
        if given.only in case.name:
            print(f"... {case.name}", file=sys.stderr, flush=True)
            rows += measure(case, given.steps, given.updates, given.threads, quick=given.quick)
            write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


def measure(case: Case, steps: int, pairs: int, threads: int, *, quick: bool) -> list[Row]:
    work = Supervised(
        model="tiny" if quick else str(resolve(PACKAGED)),
        template=case.template,
        history="template" if case.rewritten else "keep",
        dialogues=dialogues(case, case.dialogues * steps),
        dialogues_per_step=case.dialogues,
        threads=threads,
    )
    ours_env, theirs_env = (
        {**env, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        for env in (os.environ, peers_environment())
    )
    with tempfile.TemporaryDirectory() as scratch:

        def side(python: Path | str, script: str, name: str, **changes: Any) -> Side:
            file = Path(scratch) / name
            dataclasses.replace(work, **changes).write(file)
            return Side(Path(python), script, file, ours_env if python == sys.executable else theirs_env)

        ours = side(sys.executable, "silva_sft.py", "silva")
        sides = {ours: steps}
        if not quick:
            rows = ours.ask("rows")["rows"]
            sides[side(PEER, "trl_sft.py", "padded", rows=rows)] = steps
            sides[side(PEER, "trl_sft.py", "single", rows=rows, row_by_row=True)] = steps
        for each in sides:
            print(f"    {each.hello['about']}", file=sys.stderr, flush=True)
            if not each.hello.get("masked_alike", True):
                sys.exit("the template's own marks give other masks than the rows have")
        answers = in_turns(sides)
        for command in ("rl", "sft"):
            ours.ask(command)  # a warm-up
        updates = [(ours.ask("rl"), ours.ask("sft")) for _ in range(pairs)]
        for each in sides:
            each.close()
    mine, *others = answers
    for index, found in enumerate(others, 1):
        refuse_other_rows([*sides][index].hello["name"], mine, found)
    peers = [(each.hello["name"], found) for each, found in zip([*sides][1:], others, strict=True)]
    print(losses(mine, peers), "", sep="\n")
    return [*_alone(case, mine), *_compared(case, mine, peers), *against_rl(case, updates)]


def dialogues(case: Case, count: int) -> list[dict[str, Any]]:
    """Seeded ones, of which the answers are right."""
    rng = random.Random(0)
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                *(message for _ in range(rng.choice(case.questions)) for message in _asked(rng, case)),
            ],
            "tools": TOOLS[: case.tools],
        }
        for _ in range(count)
    ]


def _asked(rng: random.Random, case: Case) -> list[dict[str, Any]]:
    """A question, the call of a tool, its result, and the answer."""
    item, pieces, price = rng.choice(ITEMS), rng.randint(2, 40), rng.randint(2, 99)
    if rng.random() < 0.5:
        question = f"What do {pieces} {item} cost at {price} each?"
        tool, arguments, result = "calculator", {"expression": f"{pieces} * {price}"}, str(pieces * price)
        answer = f"{pieces} {item} cost {result}."
    else:
        question = f"How many {item} do we have, and in which aisle?"
        tool, arguments = "stock", {"item": item}
        result = f'{{"pieces": {pieces}, "aisle": {price}}}'
        answer = f"We have {pieces} {item} in aisle {price}."
    thoughts = (f"I need the {tool} for this.", f"The {tool} says it.") if case.rewritten else ("", "")
    first, second = (f"<think>\n{thought}\n</think>\n\n" if thought else "" for thought in thoughts)
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"{second}{answer}"},
    ]


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("calculator", "The value of an arithmetic expression.", expression="numbers, + - * / and brackets"),
    _tool("stock", "How many pieces of an item there are, and in which aisle.", item="name of the item"),
    _tool("order", "Order pieces of an item from a supplier.", item="name of the item", pieces="how many"),
    _tool("opening_hours", "When the shop is open on a day.", day="a date such as 2026-03-01"),
]


def in_turns(sides: Mapping[Side, int]) -> list[list[Answer]]:
    """So many steps of each side, whose order alternates."""
    answers: dict[Side, list[Answer]] = {side: [] for side in sides}
    for step in range(max(sides.values())):
        for side in [*sides][:: 1 if step % 2 else -1]:
            if step < sides[side]:
                answers[side].append(side.ask("step"))
                print(f"    {side.hello['name']}: {answers[side][-1]}", file=sys.stderr, flush=True)
    return [*answers.values()]


def refuse_other_rows(name: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """
    Raises:
        SystemExit: in a step the model was given other tokens, masks or another order than ours.
    """
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a["digest"] != b["digest"]:
            sys.exit(f"{name}: got other rows than Silva in step {step}, expected the same tokens and masks")


def apart(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[float]:
    """|ours - theirs| / theirs of the losses, step by step."""
    return [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(ours, theirs, strict=False)]


def losses(ours: Sequence[Answer], peers: Sequence[tuple[str, Sequence[Answer]]]) -> str:
    """Their table, a line a step."""
    head = ["step", "Silva", *(cell for name, _ in peers for cell in (name, "apart"))]
    lines = []
    for step, mine in enumerate(ours):
        cells = [str(step + 1), f"{mine['loss']:.6f}"]
        for _, found in peers:
            one = found[step : step + 1]
            cells += [f"{b['loss']:.6f}" for b in one] + [f"{each:.1e}" for each in apart([mine], one)]
            cells += ["", ""] if not one else []
        lines.append(cells)
    return table(head, lines)


def ratio(ours: Sequence[Answer], theirs: Sequence[Answer], metric: str) -> float:
    """Theirs over ours, the median over the pairs; the first one is a warm-up."""
    pairs = [*zip(ours, theirs, strict=False)][1:]
    return statistics.median(b[metric] / a[metric] for a, b in pairs)


def _median(answers: Sequence[Answer], metric: str) -> float:
    return statistics.median(answer[metric] for answer in answers[1:])


def _alone(case: Case, ours: Sequence[Answer]) -> list[Row]:
    bound = statistics.median(answer["flat"] / answer["trie"] for answer in ours)
    return [
        Row(case.name, "tokens a step", _median(ours, "flat"), ""),
        Row(case.name, "trained tokens a step", _median(ours, "trained"), ""),
        Row(case.name, "bound: tokens, flat over trie", bound, "x"),
        Row(case.name, "rendering of the rows", _median(ours, "rows"), "s"),
    ]


def _compared(case: Case, ours: Sequence[Answer], peers: Sequence[tuple[str, Sequence[Answer]]]) -> list[Row]:
    rows = []
    for name, theirs in peers:
        pairs = len(theirs) - 1
        rows += [
            Row(case.name, f"{metric} ({pairs} pairs)", _median(ours, metric) / scale, unit, name,
                ratio(ours, theirs, metric), target)
            for metric, unit, scale, target in (("step", "s", 1, ">= 2"), ("cpu", "s", 1, ""),
                                                ("peak", "MiB", 2**20, ">= 1"))
        ]  # fmt: skip
        rows.append(Row(case.name, f"step, {name}", _median(theirs, "step"), "s"))
        rows.append(Row(case.name, f"loss, largest relative difference of {len(theirs)} steps",
                        max(apart(ours, theirs)), "", name, None, "<= 1e-3"))  # fmt: skip
    return rows


def against_rl(case: Case, updates: Sequence[tuple[Answer, Answer]]) -> list[Row]:
    """From pairs (RL, SFT) on the same rows."""
    return [
        Row(case.name, f"SFT update, {unit}", statistics.median(sft[metric] for _, sft in updates), "s",
            "RL update, same rows", statistics.median(rl[metric] / sft[metric] for rl, sft in updates),
            ">= 0.98")
        for metric, unit in (("seconds", "wall"), ("cpu", "CPU"))
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
