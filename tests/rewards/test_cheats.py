"""Every cheat fails against every reward, and wins against one that is badly made: both prove something."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tests.engines.chat_server import said, serving

from silva.cli import main
from silva.commands.attack import attack, examples_of, show
from silva.errors import ConfigError, RewardError
from silva.protocols import Score
from silva.rewards.cheats import CHEATS, EXAMPLES, HONEST, Example, attempts
from silva.rewards.deep_research import DeepResearch
from silva.rewards.exact_match import ExactMatch
from silva.rewards.function import Function, FunctionReward
from silva.rewards.judge import Judge, word
from silva.rewards.letter import Letter
from silva.rewards.maths import Math
from silva.rewards.settings import RewardSettings
from silva.rewards.token_f1 import TokenF1
from silva.rewards.weighted import Weighted, WeightedPart

pytestmark = pytest.mark.slow

REWARDS: dict[str, tuple[RewardSettings, int]] = {  # and how many tasks an honest reply solves
    "exact_match": (ExactMatch(), 12),
    "exact_match, tag": (ExactMatch(extract="answer_tag"), 12),
    "exact_match, last line": (ExactMatch(extract="last_line"), 12),
    "exact_match, whole": (ExactMatch(extract="whole"), 12),
    "exact_match, SQuAD's rules": (ExactMatch(rules="squad", extract="boxed"), 12),
    "token_f1": (TokenF1(), 12),
    "token_f1, most words": (TokenF1(solved_at=0.9), 12),
    "letter": (Letter(), 3),
    "letter, last line": (Letter(extract="last_line"), 3),
    "math": (Math(seconds=0.5), 12),
    "math, box": (Math(seconds=0.5, extract="boxed"), 12),
    "deep_research": (DeepResearch(), 12),
    "deep_research, 20 % format": (DeepResearch(format_share=0.2, bonus=0.0), 12),
    "deep_research, exact": (DeepResearch(correctness=ExactMatch(), think=False, box=False), 12),
    "weighted": (
        Weighted(parts=(WeightedPart(reward=ExactMatch()), WeightedPart(reward=TokenF1(), weight=5.0))),
        12,
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_no_cheat_is_worth_a_solution(name: str) -> None:
    settings, tasks = REWARDS[name]
    if settings.type == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify: pip install 'silva[math]'")
    report = attack(settings.build())
    assert [hole for finding in report.findings for hole in finding.holes] == []
    assert [fault for finding in report.findings for fault in finding.faults] == []
    assert report.tasks == tasks
    assert all(
        finding.solved == 0 and finding.best < report.honest for finding in report.findings if finding.tried
    )


def test_no_cheat_talks_a_judge_over() -> None:
    """A judge that compares texts, and one that repeats what it reads: its verdicts are none."""
    pytest.importorskip("openai", reason="needs openai: pip install 'silva[openai]'")

    def fair(index, body):
        case, _ = json.JSONDecoder().raw_decode(body["messages"][1]["content"])
        says = "correct" if case["answer"] in case["references"] else "wrong"
        return said(f"{word(body['messages'])}: {says}")

    def parrot(index, body):
        case, _ = json.JSONDecoder().raw_decode(body["messages"][1]["content"])
        return fair(index, body) if case["answer"] in case["references"] else said(case["answer"])

    cheats = [cheat for cheat in CHEATS if cheat.name in ("judge", "lists", "thoughts", "disguise", "empty")]
    for judge in (fair, parrot):
        with serving(judge) as server:
            settings = Judge(model="j", base_url=server.url, key_variable="", cache="", retries=0)
            report = attack(settings.build(), {"words": EXAMPLES["words"][:2]}, cheats)
        assert (report.tasks, report.holes) == (2, 0)
        assert sum(len(finding.faults) for finding in report.findings) > 0 or judge is fair


def own(function) -> FunctionReward:
    return FunctionReward(Function(function="own.py:reward"), function)


def _first(pattern: str):
    def reward(solution_str, ground_truth):
        found = re.search(pattern, solution_str, re.S)
        return found is not None and found[1].strip() == str(ground_truth)

    return reward


def _anywhere(messages, answer):
    return any(str(answer) in message.content for message in messages)


def _evaluated(reply, answer):
    try:
        return eval(reply) == float(answer)
    except Exception:
        return False


def _difference(reply, answer):
    try:
        return abs(float(reply) - float(answer))
    except ValueError:
        return 1.0


BROKEN = {
    "contains": lambda reply, answer: str(answer) in reply,
    "is contained": lambda reply, answer: reply.strip() in str(answer),
    "first tag": _first(r"<answer>(.*?)</answer>"),
    "anywhere": lambda attempt: _anywhere(attempt.messages, attempt.answer),
    "thoughts": lambda solution_str, ground_truth: str(ground_truth) in solution_str,
    "evaluates": _evaluated,
    "a pattern": lambda reply, answer: reply == answer or reply in (".*", "(?s).*"),
    "no sign": lambda reply, answer: reply.lstrip("-") == str(answer).lstrip("-"),
    "tag at all": lambda reply, answer: "<answer>" in reply,
    "length": lambda reply, answer: reply == answer or len(reply) > 10_000,
    "any letter": lambda reply, answer: str(answer) in reply.split(),
    "believes": lambda reply, answer: reply == answer or "correct" in reply.lower(),
    "form": lambda attempt: len(attempt.messages) == 6 and "boxed" in attempt.reply,
    "unseen": lambda reply, answer: re.sub(r"[^\w\s].*|\x00|.*\x08", "", reply, flags=re.S) == answer,
    "polite": lambda reply, answer: reply == answer or "not" in reply,
    "echo": lambda attempt: attempt.reply in (str(attempt.answer), attempt.messages[0].content),
    "not far": lambda reply, answer: not _difference(reply, answer) > 1e-6,
}  # fmt: skip
WITNESSES = {
    "negated": "contains",
    "empty": "is contained", "empty_tags": "tag at all", "endless": "length", "wrong": "no sign",
    "many_tags": "first tag", "lists": "contains", "every_number": "contains", "every_letter": "any letter",
    "prompt": "echo", "working": "evaluates", "thoughts": "thoughts", "tool_result": "anywhere",
    "earlier_reply": "anywhere", "disguise": "unseen", "values": "not far", "patterns": "a pattern",
    "judge": "believes", "form_only": "form", "refusal": "polite",
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_every_cheat_wins_against_a_reward_that_falls_for_it(cheat) -> None:
    report = attack(own(BROKEN[WITNESSES[cheat.name]]), cheats=[cheat])
    assert report.holes > 0


def test_dialogues_are_what_a_rendered_reply_would_be() -> None:
    example = EXAMPLES["numbers"][0]
    *_, tools = attempts(HONEST, example)
    assert [message.role for message in tools.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert tools.messages[1].tool_calls[0].name == "search"
    assert tools.messages[2].name == "search"
    assert (tools.messages[-1].reasoning, tools.reply) == ("Now I know.", "<answer>\\boxed{42}</answer>")
    assert (tools.answer, tools.messages[0].content) == ("42", "What is 17 + 25?")


def test_what_a_task_lacks_is_not_tried() -> None:
    bare = Example("Who?", "I", ("you", "he", "she"))
    assert attempts(("[[working]]", "[[right]] or [[wrong3]]"), bare)[0].reply == "I or she"


def test_partial_credit_that_reaches_a_solution_is_a_hole() -> None:
    report = attack(own(lambda reply, answer: Score(1.0, reply == answer)), {"words": EXAMPLES["words"]})
    assert report.holes == sum(finding.tried for finding in report.findings) > 0
    assert all(finding.solved == 0 for finding in report.findings)


def test_a_reward_that_nobody_can_earn_proves_nothing() -> None:
    with pytest.raises(ConfigError, match="no honest reply solves any task"):
        attack(own(lambda reply: 0.0))


def test_faults_are_told_and_are_no_reward() -> None:
    def touchy(reply, answer):
        if not reply:
            raise RewardError("empty")
        return reply == answer

    report = attack(own(touchy), {"words": EXAMPLES["words"][2:]})
    faults = {finding.name: finding.faults for finding in report.findings if finding.faults}
    assert "empty" in faults and report.holes == 0
    assert "without a result:" in show(report)


def test_tasks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": str(n), "level": n} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    ((name, tasks),) = examples_of(str(path)).items()
    assert (name, len(tasks)) == (str(path), 20)
    assert (tasks[0].prompt, tasks[0].answer, tasks[0].wrong) == ("0?", "0", ("1", "2", "3"))
    assert tasks[1].columns["level"] == 1
    assert attack(ExactMatch().build(), examples_of(str(path))).holes == 0
    path.write_text('{"question": "a?"}\n')
    with pytest.raises(ConfigError, match="expected rows with an answer"):
        examples_of(str(path))


def test_the_command(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def loose(reply, answer):\n    return str(answer) in reply\n")
    Path("rows.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": "d"}\n')
    Path("run.toml").write_text(
        '[[environments]]\ntype = "dataset"\npath = "rows.jsonl"\nreward = {type = "letter"}\n'
    )
    assert main(["attack", "exact_match", "--extract", "answer_tag"]) == 0
    assert "no cheat reaches it" in capsys.readouterr().out
    assert main(["attack", "mine.py:loose"]) == 1
    assert "worth a solution:\n  " in capsys.readouterr().out
    assert main(["attack", "mine.py:loose", "--data", "rows.jsonl", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["tasks"], report["honest"]) == (2, 1.0)
    assert report["holes"] == sum(len(finding["holes"]) for finding in report["findings"]) > 0
    assert main(["attack", "@", "run.toml"]) == 0
    assert "3 tasks, " in capsys.readouterr().out
    for wrong, message in (
        (["attack"], "got no reward"),
        (["attack", "maths"], "unknown type"),
        (["attack", "letter", "--extra", "1"], "extra"),
        (["attack", "mine.py:absent"], "mine.py has no absent; it defines loose"),
        (["attack", "letter", "--data", "none.jsonl"], "none.jsonl"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
