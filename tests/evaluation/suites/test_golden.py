"""Scripted play over the suites, on made-up rows in the shapes that their authors publish: fixed scores, and
the same ones from metrics that are written here, from the papers, and know nothing of Silva's rewards."""

from __future__ import annotations

import asyncio
import json
import re
import string
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tests.engines.chat_server import said, serving
from tests.evaluation.suites.test_suites import JUDGE, checked

from silva.actors.script import Script
from silva.config.sections import EpisodeLimits, Eval
from silva.evaluation.evaluator import Evaluation, evaluate
from silva.evaluation.suites import SUITES, environment
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rewards.judge import word

NUMBERS = ["70", "070", "588", "16", "117"]
VALUES = [r"\frac{1}{2}", "0.5", r"\dfrac{3}{6}", "7", "-7"]
NAMES = ["the city of York", "New York", "york", "yes", "Jorvik, York"]
LETTERS = "ABDAB"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Five rows in the shape of a suite."""
    return [SHAPES[name](i) for i in range(5)]


def hops(i: int) -> dict[str, Any]:
    return {"id": f"dev_{i}", "question": f"Where is {i}?", "golden_answers": [NAMES[i], "Eboracum"],
            "metadata": {"type": "bridge"}}  # fmt: skip


def longbench(i: int) -> dict[str, Any]:
    choices = {f"choice_{letter}": f"number {letter}" for letter in "ABCD"}
    return {"_id": str(i), "domain": "Single", "question": f"Which {i}?", **choices, "answer": LETTERS[i],
            "context": f"The text of {i}. " * 20}  # fmt: skip


def solution(i: int) -> dict[str, Any]:
    text = rf"Half of it is \boxed{{0}}, so it is $\boxed{{{VALUES[i]}}}$."
    return {"problem": f"What is {i}?", "level": "Level 1", "type": "Algebra", "solution": text}


def gold(i: int) -> dict[str, Any]:
    document = {"docid": f"d{i}", "text": f"---\ntitle: Town {i}\n---\nAbout town {i}.", "url": ""}
    return {"query_id": str(i), "query": f"Which town {i}?", "answer": NAMES[i], "gold_docs": [document]}


SHAPES = {
    "aime24": lambda i: {"id": i, "problem": f"Find {i}.", "solution": "...", "answer": NUMBERS[i]},
    "aime25": lambda i: {"problem": f"Find {i}.", "answer": int(NUMBERS[i]) + i, "id": str(i)},
    "math500": lambda i: {"problem": f"Say {i}.", "solution": "...", "answer": VALUES[i], "subject": ""},
    "gsm8k": lambda i: {"question": f"How many {i}?", "answer": f"<<3*{i}=1>>1.\n#### {1000 + i % 3:,}"},
    "math": solution,
    "webwalkerqa": lambda i: {"question": f"When {i}?", "answer": NAMES[i], "root_url": "", "info": {}},
    "hotpotqa": hops,
    "2wiki": hops,
    "bamboogle": hops,
    "musique": lambda i: {"id": f"2hop__{i}", "paragraphs": [], "question": f"Who is {i}?",
                          "answer": NAMES[i], "answer_aliases": ["Eboracum"], "answerable": True},
    "gaia": lambda i: {"task_id": str(i), "Question": f"Which is {i}?", "Level": 1,
                       "Final answer": NAMES[i], "file_name": ""},
    "hle": lambda i: {"id": str(i), "question": f"Which {i}?", "image": "", "answer": NAMES[i]},
    "xbench": lambda i: {"id": str(i), "prompt": f"What {i}?", "answer": NAMES[i], "reference_steps": ""},
    "simpleqa": lambda i: {"metadata": "{}", "problem": f"Who {i}?", "answer": NAMES[i]},
    "longbench_v2": longbench,
    "browsecomp_plus": gold,
}  # fmt: skip


# --- metrics of our own here


def value(text: str) -> Fraction:
    r"""Of a number, or of \frac{a}{b}."""
    parts = re.fullmatch(r"\\d?frac\{(\d+)\}\{(\d+)\}", text)
    return Fraction(int(parts[1]), int(parts[2])) if parts else Fraction(text.replace(",", ""))


def last_box(text: str) -> str:
    """What stands in the braces of the last box."""
    rest, depth = text.rpartition("\\boxed{")[2], 1
    for end, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return rest[:end]
    raise ValueError(text)


def same_value(reply: str, row: dict[str, Any]) -> float:
    expected = str(row["solution"] if "answer" not in row else row["answer"])
    expected = last_box(expected) if "boxed" in expected else expected.rpartition("#### ")[2]
    return float(value(last_box(reply)) == value(expected))


def squad_words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def squad_f1(answer: str, reference: str) -> float:
    """evaluate-v1.1 of SQuAD with HotpotQA's rule for yes and no."""
    given, expected = squad_words(answer), squad_words(reference)
    if given != expected and {"yes", "no"} & {" ".join(given), " ".join(expected)}:
        return 0.0
    common = sum((Counter(given) & Counter(expected)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def tagged(reply: str) -> str:
    return reply.split("<answer>")[-1].split("</answer>")[0] if "<answer>" in reply else ""


def best_f1(reply: str, row: dict[str, Any]) -> float:
    expected = row.get("golden_answers") or [row["answer"], *row["answer_aliases"]]
    return max(squad_f1(tagged(reply), each) for each in expected)


def same_text(reply: str, row: dict[str, Any]) -> float:
    return float(tagged(reply).casefold() == (row.get("answer") or row["Final answer"]).casefold())


def same_letter(reply: str, row: dict[str, Any]) -> float:
    return float(reply.rpartition("Final Answer: ")[2] == row["answer"])


METRICS = {
    "mathematical equality": same_value, "token F1": best_f1, "exact match": same_text, "judge": same_text,
    "letter": same_letter,
}  # fmt: skip


def fair(index: int, body: dict[str, Any]) -> dict[str, Any]:
    """A judge that compares texts without regard to case."""
    case, _ = json.JSONDecoder().raw_decode(body["messages"][1]["content"])
    right = case["answer"].casefold() in [each.casefold() for each in case["references"]]
    return said(f"{word(body['messages'])}: {'correct' if right else 'wrong'}")


def played(entry: dict[str, Any], taskset: Any, mistakes: float) -> Evaluation:
    renderer = Renderer(tiny_tokenizer())
    tasksets = {entry["name"]: taskset}
    limits = EpisodeLimits(max_turns=12, max_episode_tokens=20_000)
    (found,) = asyncio.run(
        evaluate(
            tasksets,
            Script(renderer, mistakes=mistakes),
            renderer,
            Eval(tasks=9, samples_per_task=4),
            limits,
            seed=3,
        )
    )
    assert not found.left_out
    return found


EXPERT = 1.0
RANDOM = {
    "aime24": 0.35, "aime25": 0.15, "math500": 0.3, "gsm8k": 0.3, "math": 0.45, "webwalkerqa": 0.25,
    "hotpotqa": 0.511667, "2wiki": 0.35, "musique": 0.403333, "bamboogle": 0.531667, "gaia": 0.05,
    "hle": 0.15, "xbench": 0.3, "simpleqa": 0.2, "longbench_v2": 0.2, "browsecomp_plus": 0.15,
}  # fmt: skip
"""The headline number of random play: what the expert says of another row."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_scripted_play_has_fixed_scores(name: str, tmp_path: Path) -> None:
    suite, file = SUITES[name], tmp_path / f"{name}.jsonl"
    rows = rows_of(name)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(fair) as server:
        entry = environment(name, data=tmp_path, judge={**JUDGE, "base_url": server.url, "cache": ""})
        taskset, scores = checked(entry).taskset(), {}
        shown = {task.id: json.dumps(task.data) for task in taskset.tasks("eval")}
        for mistakes in (0.0, 1.0):
            if not mistakes and name == "browsecomp_plus":  # nobody knows where the answers are
                continue
            found = played(entry, taskset, mistakes)
            by_prompt = {next(str(v) for k, v in row.items() if k.lower() in ASKED): row for row in rows}
            own = []
            for task, trajectory in found.episodes:
                (row,) = [row for asked, row in by_prompt.items() if asked in shown[task]]
                own.append(METRICS[suite.metric](trajectory.turns[-1].messages[-1].content, row))
            assert len(own) == 20
            scores[mistakes] = found.estimates["reward" if suite.metric == "token F1" else "success"].mean
            assert scores[mistakes] == pytest.approx(sum(own) / 20, abs=1e-12)
    assert scores.get(0.0, EXPERT) == EXPERT
    assert scores[1.0] == pytest.approx(RANDOM[name], abs=1e-6)


ASKED = ("problem", "question", "prompt", "query")
