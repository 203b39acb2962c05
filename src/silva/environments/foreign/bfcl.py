"""BFCL v4, the Berkeley Function Calling Leaderboard (Patil et al., ICML 2025), from the package bfcl-eval.

    type = "bfcl"                          # pip install --no-deps bfcl-eval mpmath
    categories = ["simple_python", "multi_turn_base"]

One turn: a question and functions; the first reply is compared with the possible answers by the package's own
checker (`irrelevance`: no call is right; `live_relevance`: any call is). Several turns: calls are answered by
the package's simulated services (bfcl_services.py). Memory and web search are not here: they need other
packages and services. Names of functions have _ for dots, which APIs do not take, as on the leaderboard.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.foreign.bfcl_services import SCENARIOS, ServiceDialogue
from silva.environments.foreign.library import imported
from silva.environments.foreign.settings import ForeignSettings
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError
from silva.protocols import Environment, TaskSet
from silva.rendering.tool_calls import write_calls
from silva.types import Message, Observation, Role, Step, Task, ToolCall, ToolSpec

Category = Literal[
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple",
    "irrelevance", "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
    "live_irrelevance", "live_relevance", "multi_turn_base", "multi_turn_miss_func",
    "multi_turn_miss_param", "multi_turn_long_context",
]  # fmt: skip
PACKAGE = "bfcl-eval>=2026.3' --no-deps 'mpmath"
MODEL = "silva"
TYPES = {
    "dict": "object", "hashmap": "object", "hashtable": "object", "object": "object", "float": "number",
    "double": "number", "number": "number", "integer": "integer", "long": "integer", "short": "integer",
    "byte": "integer", "bigint": "integer", "boolean": "boolean", "bool": "boolean", "array": "array",
    "arraylist": "array", "list": "array", "tuple": "array", "queue": "array", "stack": "array",
}  # fmt: skip
"""BFCL's names of types -> those of JSON schema; all others are texts."""


class Bfcl(ForeignSettings):
    """Functions to be called as a question asks, in one turn or in several with simulated services."""

    licence: ClassVar[str] = "Apache-2.0 (bfcl-eval)"
    needs: ClassVar[str] = "`pip install --no-deps bfcl-eval mpmath`"
    packages: ClassVar[tuple[str, ...]] = ("bfcl_eval",)

    type: Literal["bfcl"] = "bfcl"
    categories: Annotated[tuple[Category, ...], Field(min_length=1)] = ("simple_python",)
    """Categories of BFCL v4, one or more; each task belongs to one."""
    max_steps: Positive = 20
    """Replies with calls to one message of the user, in tasks of several turns; one more ends the task."""

    def taskset(self) -> TaskSet:
        folder = Path(imported("bfcl_eval", self.type, PACKAGE).__file__).parent / "data"
        drafts = [draft for category in self.categories for draft in drafts_of(folder, category)]
        check = checker()
        return listed(self, drafts, lambda task: self._episode(task, check))

    def _episode(self, task: Task, check: Any) -> Environment:
        if task.data["category"] in SCENARIOS:
            return ServiceDialogue(self, task, specs)
        return BfclEpisode(self, task, check)


class BfclEpisode(BaseEnvironment):
    """One question. What the first reply calls is graded."""

    def __init__(self, settings: Bfcl, task: Task, check: Any) -> None:
        super().__init__(settings, task)
        self.check = check

    async def reset(self) -> Observation:
        self._begin()
        said = [self.say(each["content"], role(each["role"])) for each in self.task.data["turns"][0]]
        return Observation(tuple(said), tools=specs(self.task.data["functions"], self.language))

    async def step(self, message: Message) -> Step:
        self._check_running()
        self._end()
        solved = self._is_right(message.tool_calls)
        metrics = {"success": float(solved), "calls": float(len(message.tool_calls))}
        return Step(rewards={"correct": float(solved)}, terminated=True, metrics=metrics)

    @property
    def language(self) -> str:
        """python, java or javascript."""
        return {"simple_java": "java", "simple_javascript": "javascript"}.get(self.category, "python")

    @property
    def category(self) -> str:
        category: str = self.task.data["category"]
        return category

    def expert_reply(self) -> str:
        """The first of the possible values of every argument.

        Raises:
            CapabilityError: the values are those of another language, for which no form in JSON is given.
        """
        if self.category.endswith("irrelevance"):
            return "None of these functions fits."
        if self.language != "python":
            raise CapabilityError(
                f"environment {self.settings.label}: no expert for calls in {self.language}"
            )
        if self.task.answer is None:  # any call is right
            function = self.task.data["functions"][0]
            return write_calls([ToolCall(tool_name(function["name"]), {})])
        return write_calls([_call(call) for call in self.task.answer])

    def random_reply(self, seed: int) -> str:
        """A call of some function without arguments, or none."""
        functions = self.task.data["functions"]
        if not functions or seed % 3 == 0:
            return "I do not know."
        return write_calls([ToolCall(tool_name(functions[seed % len(functions)]["name"]), {})])

    def _is_right(self, calls: Sequence[ToolCall]) -> bool:
        if self.category.endswith("irrelevance"):
            return not calls
        if self.category.endswith("relevance"):
            return bool(calls)
        given = [{call.name: dict(call.arguments)} for call in calls]
        functions = [dict(function) for function in self.task.data["functions"]]
        return bool(self.check(functions, given, self.task.answer, self.language, self.category))

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.check)


def drafts_of(folder: Path, category: str) -> Iterator[Draft]:
    """The tasks of a category; the texts of the user are the key."""
    rows = _lines(folder / f"BFCL_v4_{category}.json")
    answers = folder / "possible_answer" / f"BFCL_v4_{category}.json"
    known = {row["id"]: row["ground_truth"] for row in _lines(answers)} if answers.exists() else {}
    for row in rows:
        data = {"id": row["id"], "category": category, "turns": row["question"]}
        if category in SCENARIOS:
            data |= {key: row.get(key) or {} for key in ("initial_config", "missed_function")}
            data["services"] = row["involved_classes"]
        else:
            data["functions"] = row["function"]
        yield Draft(data, known.get(row["id"]), [[category, row["question"], row.get("function")]])


def checker() -> Any:
    """(functions, calls, possible answers, language, category) -> whether the package calls it valid."""
    name = "bfcl_eval.constants.model_config"
    if name not in sys.modules:  # the package's own imports the client of every API, to say one thing of each
        config: Any = types.ModuleType(name)
        config.MODEL_CONFIG_MAPPING = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}
        sys.modules[name] = config
    module = imported("bfcl_eval.eval_checker.ast_eval.ast_checker", "bfcl", PACKAGE)
    languages = imported("bfcl_eval.constants.enums", "bfcl", PACKAGE).Language

    def check(functions: Any, calls: Any, answer: Any, language: str, category: str) -> bool:
        found = module.ast_checker(functions, calls, answer, languages(language), category, MODEL)
        return bool(found["valid"])

    return check


def specs(functions: Sequence[Mapping[str, Any]], language: str = "python") -> tuple[ToolSpec, ...]:
    """The functions as tools with JSON schemas. An argument for another language is text in that language."""
    return tuple(
        ToolSpec(
            tool_name(function["name"]),
            f"{function['description']} The function is in {language.capitalize()}.",
            _schema(function["parameters"], "" if language == "python" else language),
        )
        for function in functions
    )


def tool_name(name: str) -> str:
    return name.replace(".", "_")


def role(name: str) -> Role:
    return "system" if name == "system" else "assistant" if name == "assistant" else "user"


def _schema(given: Mapping[str, Any], language: str = "") -> dict[str, Any]:
    """Args: language: of arguments that are written as text; "" for JSON."""
    kind = TYPES.get(str(given.get("type", "string")).casefold(), "string")
    schema = {key: given[key] for key in ("description", "enum", "default", "required") if key in given}
    if "properties" in given:
        written = _written if language else (lambda each, _: _schema(each))
        schema["properties"] = {key: written(each, language) for key, each in given["properties"].items()}
    if isinstance(given.get("items"), Mapping):
        schema["items"] = _schema(given["items"])
    return {"type": kind, **schema}


def _written(given: Mapping[str, Any], language: str) -> dict[str, Any]:
    items = given.get("items") or {}
    of = f" of {items['type']}" if "type" in items else ""
    about = (
        f"{given.get('description', '')} The value, a {given.get('type', 'any')}{of}, as code of {language}."
    )
    return {"type": "string", "description": about.strip()}


def _call(possible: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """The call with the first possible value of each argument."""
    ((name, arguments),) = possible.items()
    return ToolCall(tool_name(name), _first(arguments))


def _first(possible: Mapping[str, Any]) -> dict[str, Any]:
    """Among possible values, "" says that the argument may be missing; objects hold possible values of their
    own."""
    found = {}
    for key, values in possible.items():
        given = [each for each in (values if isinstance(values, list) else [values]) if each != ""]
        if given:
            found[key] = _value(given[0])
    return found


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _first(value)
    return [_value(each) for each in value] if isinstance(value, list) else value


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON Lines, in files that are called .json."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
