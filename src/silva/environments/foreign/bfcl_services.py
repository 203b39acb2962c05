"""BFCL's tasks of several turns: a file system, a car, a travel agency and others, simulated by the package.

The user says one thing after the other; calls are answered by the services, and a reply without a call ends
the turn. After each turn the services must be in the state that the task's own calls lead to, and what those
calls returned must have been returned; the first turn that fails ends the task. Nothing that the policy
writes is evaluated: a call is a method of a service, by name, with the arguments as JSON.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.environments.bases.environment import BaseEnvironment
from silva.rendering.tool_calls import write_calls
from silva.types import Message, Observation, Step, Task, ToolCall, ToolSpec

SCENARIOS = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
CONFIG = "bfcl_eval.constants.executable_backend_config"
MORE = "More functions are available now. Can you do it with them?"


class ServiceDialogue(BaseEnvironment):
    """One task. `services` are those that the policy calls, `right` those of the task's own calls."""

    def __init__(
        self, settings: Any, task: Task, specs: Callable[[Sequence[Mapping[str, Any]]], tuple[ToolSpec, ...]]
    ) -> None:
        super().__init__(settings, task)
        self.specs = specs
        self.turn, self.steps, self.called = 0, 0, 0  # of the user; replies with calls and calls in this turn
        self.returned: list[str] = []  # of all calls so far

    async def reset(self) -> Observation:
        self._begin()
        self.services, self.right = self._begun(), self._begun()
        return self._asked()

    async def step(self, message: Message) -> Step:
        self._check_running()
        if message.tool_calls or message.errors:
            return self._call(message)
        if not self._turn_is_right():
            return self._final(False)
        self.turn += 1
        if self.turn == len(self.task.data["turns"]):
            return self._final(True)
        return Step(self._asked())

    def expert_reply(self) -> str:
        """The task's own calls of this turn in one reply, then words that end the turn."""
        if self.called or not (calls := self.task.answer[self.turn]):
            return "Done."
        return write_calls([read_call(text, self.services) for text in calls])

    def random_reply(self, seed: int) -> str:
        """A call of some function without arguments, or the end of the turn."""
        offered = self._offered()
        return "Done." if seed % 2 else write_calls([ToolCall(offered[seed % len(offered)].name, {})])

    def _begun(self) -> dict[str, Any]:
        """The services in the state that the task begins with, by name."""
        known, data = importlib.import_module(CONFIG), self.task.data
        services = {}
        for name in data["services"]:
            service = getattr(importlib.import_module(known.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in known.STATELESS_CLASSES:
                given = copy.deepcopy(data["initial_config"].get(name, {}))
                service._load_scenario(given, long_context="long_context" in data["category"])
            services[name] = service
        return services

    def _asked(self) -> Observation:
        """What the user says in this turn; nothing if functions were missing before."""
        self.steps = self.called = 0
        said = self.task.data["turns"][self.turn]
        messages = [self.say(each["content"]) for each in said] or [self.say(MORE)]
        return Observation(tuple(messages), tools=self._offered())

    def _functions(self) -> list[dict[str, Any]]:
        """The functions of the task's services, as the package describes them."""
        known = importlib.import_module(CONFIG)
        folder = (
            Path(importlib.import_module("bfcl_eval").__file__ or "").parent / "data" / "multi_turn_func_doc"
        )
        files = [folder / known.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in self.task.data["services"]]
        return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]

    def _offered(self) -> tuple[ToolSpec, ...]:
        """The functions, without those that come later."""
        later = self.task.data["missed_function"].items()
        missing = {name for turn, names in later if int(turn) > self.turn for name in names}
        return self.specs([function for function in self._functions() if function["name"] not in missing])

    def _call(self, message: Message) -> Step:
        self.steps += 1
        if self.steps > self.settings.max_steps:
            return self._final(False, truncated=True)
        shown = [self.say(f"Error: {error}", "tool") for error in message.errors]
        # Also those that come later: the task's own calls use some of them too early.
        known = {function["name"] for function in self._functions()}
        for call in message.tool_calls:
            self.called += 1
            if call.name in known:
                result = answer(self.services, call)
                self.returned.append(result)
            else:
                result = f"Error: there is no function {call.name}"
            shown.append(self.say(result, "tool", call.name))
        metrics = {"tool_calls": float(len(message.tool_calls) + len(message.errors))}
        return Step(Observation(tuple(shown), tools=self._offered()), metrics=metrics)

    def _turn_is_right(self) -> bool:
        """Grades as the package's checker of tasks with several turns does."""
        own = self.task.answer[self.turn]
        if not own:  # what the user wants cannot be done yet
            return True
        wanted = [answer(self.right, read_call(text, self.right)) for text in own]
        if not self.called:
            return False
        same = all(_state(self.services[name]) == _state(service) for name, service in self.right.items())
        left = list(self.returned)
        for each in wanted:
            if each not in left:
                return False
            left.remove(each)
        return same

    def _final(self, solved: bool, truncated: bool = False) -> Step:
        self._end()
        metrics = {"success": float(solved), "turns_right": self.turn / len(self.task.data["turns"])}
        return Step(
            rewards={"correct": float(solved)}, terminated=not truncated, truncated=truncated, metrics=metrics
        )

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.specs)


def answer(services: Mapping[str, Any], call: ToolCall) -> str:
    """What a service returns, as text; what it raises, in the package's words."""
    try:
        found = _method(services, call.name)(**copy.deepcopy(dict(call.arguments)))
    except Exception as error:  # wrong arguments, or what the service does not allow
        return f"Error during execution: {error}"
    if isinstance(found, dict):
        try:
            return json.dumps(found)
        except TypeError:
            return str(found)
    return str(found)


def read_call(text: str, services: Mapping[str, Any]) -> ToolCall:
    """A call as the task's answers write it, such as "cd(folder='temp')": only literals are read."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"got {text!r}, expected one call of a function")
    names = inspect.signature(_method(services, call.func.id)).parameters
    arguments = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
    arguments |= {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    return ToolCall(call.func.id, arguments)


def _method(services: Mapping[str, Any], name: str) -> Any:
    """Raises AttributeError if no service has it."""
    if name.startswith("_"):
        raise AttributeError(f"name '{name}' is not defined")
    for service in reversed([*services.values()]):
        if callable(found := getattr(service, name, None)):
            return found
    raise AttributeError(f"name '{name}' is not defined")


def _state(service: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(service).items() if not key.startswith("_")}
