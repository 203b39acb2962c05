"""Resources servers of NeMo-Gym, over HTTP.

    type = "nemo_gym"
    url = "http://127.0.0.1:8000"          # of the resources server
    path = "train.jsonl"                   # rows with responses_create_params

    POST /seed_session  the row            starts an episode: its cookie comes with all that follows
    POST /<tool>        the arguments      for each call of a tool; the answer is shown as it is
    POST /verify        row and dialogue   {"reward": ...}

NeMo-Gym itself runs elsewhere: it needs a newer Python. A server whose answer names an error, masks the
sample or says that its judge gave no verdict measured nothing: the episode has no result, whatever `reward`
says. What it found wrong with the reply stands under keys and values that are known (`WRONG_REPLY`,
`WRONG_REASONS`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.config.sections import Above0, WebAddress
from silva.data.rows import Row, read_rows
from silva.environments.foreign.dialogue import (
    ForeignDialogue,
    ForeignDialogueSettings,
    ForeignSession,
    Graded,
)
from silva.environments.foreign.library import as_json, imported
from silva.environments.tasks import Draft, listed
from silva.errors import ConfigError, SilvaError
from silva.rendering.openai import ROLES, arguments_text, call_ids, spec_of, text_of, thoughts_apart
from silva.tools.calls import SessionTool
from silva.tools.function import ToolError
from silva.types import Message, Role, Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "silva[search]"  # httpx2
JSON = {"Content-Type": "application/json"}
SHOWN = 300  # characters of an answer in a message


REFUSED = (400, 422)  # what a server answers to arguments that it does not accept
FAILURES = ("mask_sample", "invalid_judge_response", "invalid_gen_base", "invalid_base_gen")
"""Keys of servers whose verdict is missing, besides all with "error" in them and all that begin with _ng_."""
WRONG_REPLY = ("error_type", "error_message", "error_mode", "error_feedback")
"""Keys of structured_outputs, structeval, bunsenbench_chemistry_mcq, math_formal_lean: the reply is wrong."""
WRONG_REASONS = (
    "none", "no_sql_extracted", "execution_error", "judge_evaluation_failed", "judge_not_equivalent",
    "model_output_invalid", "schema_check_failed", "task_complete_check_failed",
    "string_similarity_below_threshold", "similarity_below_threshold", "argument_below_threshold",
    "no_tool_call_in_rollout", "tool_name_mismatch", "target_mismatch",
)  # fmt: skip
"""Values of `failure_reason` that say the same; others, such as gold_execution_error, are the server's."""


class NemoGymFault(SilvaError, OSError):
    """The server failed: the episode has no result."""


class NemoGym(ForeignDialogueSettings):
    """A resources server of NeMo-Gym."""

    licence: ClassVar[str] = "that of the server"
    needs: ClassVar[str] = "`url` of a running server, `path`"
    packages: ClassVar[tuple[str, ...]] = ("httpx2",)

    type: Literal["nemo_gym"] = "nemo_gym"
    url: WebAddress
    """Address of the resources server."""
    path: str
    """File of rows (JSON Lines) with `responses_create_params` and whatever the server's /verify reads."""
    eval_path: str = ""
    """The same, held out in place of a share of `path`."""
    timeout: Above0 = 60.0
    """Seconds the server may take for one answer."""
    wrong_reply: tuple[str, ...] = ()
    """Keys of /verify with "error" in them that say what is wrong with a reply: the reward counts."""

    def taskset(self) -> TaskSet:
        library = imported("httpx2", self.type, PACKAGE)

        def build(task: Task) -> ForeignDialogue:
            return ForeignDialogue(self, task, lambda: NemoGymSession(self, library, task.data["row"]))

        held_out = [_draft(row) for row in read_rows(self.eval_path)] if self.eval_path else None
        return listed(self, [_draft(row) for row in read_rows(self.path)], build, evaluation=held_out)


class NemoGymSession(ForeignSession):
    def __init__(self, settings: NemoGym, library: Any, row: Mapping[str, Any]) -> None:
        self.settings, self.library, self.row = settings, library, row
        # What checks certificates takes 20 ms to make: not in every episode, and not for plain HTTP.
        verify = _certificates(library) if settings.url.startswith("https:") else False
        url = settings.url.rstrip("/")
        self.client = library.AsyncClient(timeout=settings.timeout, base_url=url, verify=verify)
        params = row["responses_create_params"]
        self.opening = messages_of(params["input"])
        self.tools = [
            SessionTool(spec_of(each), settings.timeout, functools.partial(self.call, each["name"]))
            for each in params.get("tools") or ()
            if each.get("type") == "function"
        ]

    async def start(self) -> None:
        response = await self.post("/seed_session", self.row)
        if not response.is_success:  # what else it says is not needed
            raise self._refused(response, "/seed_session")

    async def post(self, path: str, body: Any) -> Any:
        """The response, whatever its status.

        Raises:
            NemoGymFault: there is none.
        """
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self.client.post(path, content=as_json(body), headers=JSON)
        except (self.library.HTTPError, TimeoutError) as error:
            name = type(error).__name__
            raise NemoGymFault(f"nemo_gym: {self.settings.url}{path}: {name}: {error}") from error

    async def call(self, tool: str, arguments: Mapping[str, object]) -> str:
        """
        Raises:
            ToolError: the server refuses the arguments.
            NemoGymFault: it failed. (NeMo-Gym's own agent shows that to the model too.)
        """
        response = await self.post(f"/{tool}", dict(arguments))
        if response.status_code in REFUSED:
            raise ToolError(response.text[:SHOWN] or f"status {response.status_code}")
        if not response.is_success:
            raise self._refused(response, f"/{tool}")
        return str(response.text)

    async def grade(self, messages: Sequence[Message]) -> Graded:
        body = {**self.row, "response": response_of(messages, self.row["responses_create_params"])}
        response = await self.post("/verify", body)
        try:
            told = response.json() if response.is_success else None
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise self._refused(response, "/verify")
        if signs := _failures(told, self.row, self.settings.wrong_reply):
            raise NemoGymFault(f"nemo_gym: /verify measured nothing: {str(signs)[:SHOWN]}")
        if "reward" not in told:
            raise NemoGymFault(f"nemo_gym: /verify: got {sorted(told)}, expected `reward`")
        numbers = {
            key: float(value)
            for key, value in told.items()
            if key not in ("reward", *self.row) and isinstance(value, (bool, int, float))
        }
        return Graded(told["reward"], numbers)

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.aclose()

    def _refused(self, response: Any, path: str) -> NemoGymFault:
        status = f"status {response.status_code}: {response.text[:SHOWN]!r}"
        return NemoGymFault(f"nemo_gym: {self.settings.url}{path}: {status}")


def _failures(told: Mapping[str, Any], row: Mapping[str, Any], wrong_reply: Sequence[str]) -> dict[str, Any]:
    """What says that nothing was measured, in an answer of /verify that also repeats the row."""

    def says(key: str, value: Any) -> bool:
        if not value or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return False  # numbers count or measure
        if key == "failure_reason":
            return value not in WRONG_REASONS
        if key == "status" or key.endswith("_status"):
            return bool(value == "error")
        if key.startswith("_ng_") or key in FAILURES:
            return True
        if "error" in key:
            return key not in WRONG_REPLY and key not in wrong_reply
        nested = value if isinstance(value, Mapping) else {}  # instance_config.mask_sample, details.error
        return bool(nested.get("error") or nested.get("mask_sample"))

    return {key: value for key, value in told.items() if value != row.get(key) and says(key, value)}


@functools.cache
def _certificates(library: Any) -> Any:
    return library.create_ssl_context()


def messages_of(given: Any) -> list[tuple[Role, str]]:
    """Role and text of the `input` of `responses_create_params`: text, or items of the Responses API."""
    if isinstance(given, str):
        return [("user", given)]
    return [(ROLES[item["role"]], text_of(item["content"])) for item in given]


def response_of(messages: Sequence[Message], params: Mapping[str, Any]) -> dict[str, Any]:
    """The dialogue as a response of OpenAI's Responses API, which /verify reads."""
    output: list[dict[str, Any]] = []
    for message, ids in zip(messages, call_ids(messages), strict=True):
        number = len(output)
        if message.role == "assistant":
            thoughts, answer = thoughts_apart(message)
            if thoughts:
                summary = [{"type": "summary_text", "text": thoughts}]
                output.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary})
            if answer.strip() or not ids:
                part = {"type": "output_text", "text": answer, "annotations": []}
                output.append({
                    "id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed",
                    "content": [part],
                })  # fmt: skip
            for call, id in zip(message.tool_calls, ids, strict=True):
                output.append({
                    "type": "function_call", "call_id": id, "name": call.name,
                    "arguments": arguments_text(call), "id": f"fc_{id}", "status": "completed",
                })  # fmt: skip
        elif message.role == "tool" and ids:
            output.append({"type": "function_call_output", "call_id": ids[0], "output": message.content})
    return {
        "id": "resp_1", "created_at": 0.0, "model": params.get("model") or "silva", "object": "response",
        "output": output, "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"), "tools": list(params.get("tools") or ()),
        "status": "completed",
    }  # fmt: skip


def _draft(row: Row) -> Draft:
    """
    Raises:
        ConfigError: the row has no `responses_create_params` with an `input` of text.
    """
    params = row.values.get("responses_create_params")
    if not isinstance(params, dict) or "input" not in params:
        raise ConfigError(
            f"{row.where}: responses_create_params: got {str(params)[:80]}, expected an object with `input`"
        )
    try:
        if not messages_of(params["input"]):
            raise ValueError("it is empty")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{row.where}: responses_create_params.input: expected text or messages: {error!r}"
        ) from None
    return Draft({"row": dict(row.values)}, None, [params["input"]])
