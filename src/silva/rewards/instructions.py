"""Instructions that a program can check, as in IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833): "no
commas", "at least 300 words", "end with this phrase".

The columns `instruction_id_list` and `kwargs` of a row name them (or an answer that is an object with both);
the package if-verifiable checks them, strictly (the reply as it is) and loosely (also without its first or
last line, and without asterisks).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from silva.errors import ConfigError, RecordError, RewardError
from silva.protocols import Attempt, Reward, Score
from silva.rewards.settings import RewardSettings

NLTK = "python -m nltk.downloader punkt punkt_tab averaged_perceptron_tagger_eng stopwords"


class Instructions(RewardSettings):
    """1 for a reply that follows all instructions of the row, else 0."""

    type: Literal["instructions"] = "instructions"
    benchmark: Literal["ifeval", "ifbench"] = "ifeval"
    """The benchmark that the instructions come from."""
    loose: bool = False
    """Grade without a first or last line and without asterisks if that helps."""

    def build(self) -> Reward:
        try:
            registry = importlib.import_module(f"if_verifiable.{self.benchmark}.instructions_registry")
            common = importlib.import_module("if_verifiable.common")
        except ImportError as error:
            raise ConfigError(
                f"reward instructions: cannot import {error.name}: pip install if-verifiable"
            ) from error
        if self.benchmark == "ifeval":  # the language of a text is guessed with random numbers
            importlib.import_module("langdetect").DetectorFactory.seed = 0
        return InstructionsReward(self, registry.INSTRUCTION_DICT, common.evaluate_instructions)


class InstructionsReward:
    def __init__(self, settings: Instructions, known: Mapping[str, Any], evaluate: Any) -> None:
        self.settings, self.known, self.evaluate = settings, known, evaluate

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`."""
        self._read(answer, data)

    async def score(self, attempt: Attempt) -> Score:
        """Raises RewardError if NLTK's data are missing, which some instructions need."""
        names, arguments = self._read(attempt.answer, attempt.data)
        prompt = next((m.content for m in attempt.messages if m.role == "user"), "")
        try:
            _, found = self.evaluate(attempt.reply, names, arguments, prompt, self.known)
        except LookupError as error:
            if "nltk" not in str(error).casefold():
                raise
            raise RewardError(f"reward instructions: {', '.join(names)}: data are missing: {NLTK}") from error
        solved = bool(found.binary_loose if self.settings.loose else found.binary_strict)
        metrics = {
            "strict": found.binary_strict,
            "loose": found.binary_loose,
            "instructions_strict": found.partial_strict,
            "instructions_loose": found.partial_loose,
        }
        return Score(float(solved), solved, metrics)

    def _read(self, answer: Any, data: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        """Names and arguments. The package passes over names that it does not know: they are refused here."""
        given = answer if isinstance(answer, Mapping) else data
        names, arguments = given.get("instruction_id_list"), given.get("kwargs")
        fine = isinstance(names, list) and isinstance(arguments, list) and len(names) == len(arguments) > 0
        unknown = [name for name in names or () if name not in self.known] if fine else []
        if not isinstance(names, list) or not isinstance(arguments, list) or not fine or unknown:
            raise RecordError(
                f"answer of the task: got {unknown[0] if unknown else f'{answer!r:.100}'}, expected lists "
                "instruction_id_list and kwargs of equal length, there or in columns, with instructions of "
                f"{self.settings.benchmark}"
            )
        return names, [dict(each or {}) for each in arguments]
