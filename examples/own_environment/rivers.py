"""An environment of your own: questions, and a tool to answer them with."""

from silva.environments.bases.tool_qa import Question, ToolQA
from silva.tools.function import ToolError
from silva.types import ToolCall

KM = {"Danube": 2857, "Rhine": 1233, "Elbe": 1094, "Loire": 1006, "Ebro": 930, "Seine": 775, "Tiber": 406}


def length(river: str) -> int:
    """How long a river is, in kilometres."""
    if river not in KM:
        raise ToolError(f"unknown river {river!r}; known: {', '.join(KM)}")
    return KM[river]


class Rivers(ToolQA):
    name: str = "rivers"
    eval_size: int = 8
    eval_share: float = 0.4

    def questions(self):
        return [
            Question(
                f"How many km is the {a} longer than the {b}?",
                str(KM[a] - KM[b]),
                [ToolCall("length", {"river": a}), ToolCall("length", {"river": b})],  # what an expert calls
            )
            for a in KM
            for b in KM
            if KM[a] > KM[b]
        ]

    def tools(self):
        return [length]
