"""The benchmark of the engine refuses names that it does not know before it starts anything."""

import sys
from pathlib import Path
from typing import Any

import decode
import pytest
import recorded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peers", "vllm", "vLLM"), "argument --peers: invalid choice: 'vLLM' (choose from 'generate', "),
        (("--only", "9 x"), "argument --only: no case contains '9 x' (names: '1 x 64 + 64, one prompt', "),
        (("--recorded", "chess"), "argument --recorded: invalid choice: 'chess' (choose from 'quickstart', "),
        (("--quick", "--only", "32"), "no case contains '32' (names: '8 x 64 + 8, one prompt')"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_at_once(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        decode.main()
    shown = capsys.readouterr()
    assert ended.value.code == 2 and words in shown.err
    assert "starting" not in shown.err and shown.out == ""


def test_help_lists_the_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", "--help"])
    with pytest.raises(SystemExit):
        decode.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "{generate,continuous,vllm,llama.cpp}" in shown and "'32 x 448 + 64, one prompt'" in shown


class Worker:
    """Answers as decode_workers.py does, each round twice as many tokens a second."""

    def __init__(self, digest: str, tokens: int, accepted: int = 0) -> None:
        self.digest, self.tokens, self.accepted, self.asked = digest, tokens, accepted, []

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked.append((do, what))
        self.tokens *= 1 + (do == "play")
        return {
            "seconds": 4.0, "tokens": self.tokens, "digest": self.digest, "steps": 9,
            "decoded": 30, "drafted": 20, "accepted": self.accepted,
        }  # fmt: skip


def test_recorded_cases_compare_the_same_work() -> None:
    policy = recorded.Recording(
        "tool_use", Path("weights"), [[[1, 2], [3]]], [[[4], [4, 5]]], {"max_tokens": 9}
    )
    workers = {"Silva": Worker("a", 30, accepted=10), "drafts: off": Worker("a", 20), "vLLM": Worker("", 60)}
    off, vllm, step, share = recorded.measure(policy, 8, workers, "Silva", "drafts: off", rounds=3)
    assert (off.against, off.value, off.ratio, off.target) == ("drafts: off", 30 * 2**3 / 4, 1.5, ">= 1.5")
    assert (vllm.against, vllm.ratio, vllm.target) == ("vLLM", 0.5, ">= 1")
    assert (step.value, share.value) == (30 / 20, 0.5)
    ours, theirs = ([what for do, what in workers[name].asked if do == "play"] for name in ("Silva", "vLLM"))
    assert ours == theirs and [what["seed"] for what in ours] == [0, 1, 2, 3]
    assert len(ours[0]["episodes"]) == 32 and ours[0]["slots"] == 8
    for name in ("Silva", "drafts: off"):
        assert [do for do, _ in workers[name].asked] == ["remember", "play"] * 4


def test_a_completion_that_depends_on_drafts_ends_the_benchmark() -> None:
    policy = recorded.Recording("tool_use", Path("weights"), [], [[[4]]], {})
    with pytest.raises(SystemExit, match="tool_use, 8 requests: completions differ"):
        recorded.measure(policy, 8, {"Silva": Worker("a", 1), "off": Worker("b", 1)}, "Silva", "off", 1)
