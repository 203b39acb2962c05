"""A model behind a chat API of OpenAI's form, as an actor: plays through messages, for evaluation only.

    fault                                          what becomes of the request
    429, 408, 409, 5xx, cut connection, no answer  sent again, after what Retry-After says; then NoReply
    in time, a body that is no answer
    400, 413, 422, an answer that ended otherwise  NoReply: its episode has no result (`redo`)
    than by itself, its calls or its length
    400: the context is too long                   ContextOverflow: not solved, as with a local model
    429: the account has no money; 401, 403, 404   EngineError: ends the evaluation
    the next request may cost too much             CostLimit: ends the evaluation

No fault ever becomes an answer. Not here: the forms of messages (chat_messages.py), the client
(wire/chat_api.py), and limits, pauses and costs (wire/requests.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from silva.actors.chat_messages import ChatAnswer, chat_messages, chat_tools, most_tokens, read_answer
from silva.actors.settings import PaidEngineSettings
from silva.config.sections import Sampling
from silva.errors import CapabilityError, ContextOverflow, EngineError, NoReply
from silva.protocols import Reply, Request
from silva.types import CompletionStop, Segment
from silva.wire.chat_api import NO_MONEY, ChatApi
from silva.wire.requests import Requests, Transient, Usage, hidden, key_of
from silva.wire.transport import Refused

REFUSED = (400, 413, 422)  # this request, not others
WHOLE = ("stop", "tool_calls", "function_call", "length", "max_tokens")
"""Why an answer ends that is one; filters, errors and what is not known leave none."""
OVERFLOW = re.compile(
    r"(context|prompt)[ _](length|window|size|too[ _]long)|too many (input )?tokens|"
    r"\b(inputs?|prompt|context|sequence|conversation|tokens?|text)\b.{0,80}"
    r"(too (long|large)|longer than|exceed|must be <=)|reduce the length of the (messages|prompt|input)"
)
"""The words of APIs for a dialogue that is too long. "max_tokens is too large" is not among them: that is a
fault of the configuration."""


class ChatModel:
    """Answers with the model of a chat API.

    Args:
        system: system message for environments that give none.

    Raises:
        CapabilityError: the API cannot sample so, or its package is missing.
        ConfigError: there is no key.
    """

    reads_tokens: ClassVar[bool] = False
    sdk: ClassVar[str] = "openai"
    lacks: ClassVar[tuple[str, ...]] = ("top_k", "min_p")
    hottest: ClassVar[float] = math.inf

    def __init__(
        self, settings: PaidEngineSettings, sampling: Sampling, *, system: str | None = None
    ) -> None:
        for name in self.lacks:
            if getattr(sampling, name):
                raise CapabilityError(
                    f"sampling.{name} = {getattr(sampling, name)}: a chat API has no {name}; expected 0"
                )
        if sampling.temperature > self.hottest:
            raise CapabilityError(
                f"sampling.temperature = {sampling.temperature:g}: the API takes at most {self.hottest:g}"
            )
        self.settings, self.sampling, self.system = settings, sampling, system
        key = key_of(settings.key_variable, "engine.key_variable")
        self._api = ChatApi("engine", settings.base_url, key, settings.timeout, sdk=self.sdk)
        self.reach, self.close = self._api.reach, self._api.close
        self._requests = Requests(settings.limits, settings.prices)
        self.counts = self._requests.counts
        self._thoughts_in = ""  # the field in which this server gives thoughts, once it has given some

    async def reply(self, request: Request) -> Reply:
        if request.prefill:
            raise CapabilityError(
                f"environment {request.label!r} begins the answer ({request.prefill!r}), and a chat API "
                "cannot continue it; set prefill = false there"
            )
        body = self._body(request)
        answer = await self._requests.call(
            lambda: self._send(body, request),
            seed=request.seed,
            most=Usage(most_tokens(body), request.max_tokens),
            usage=lambda answer: answer.usage,
        )
        if answer.finish not in WHOLE:
            self._requests.counts.failed += 1
            raise NoReply(f"the API cut the answer: its finish_reason is {answer.finish!r}")
        self._thoughts_in = answer.thoughts_in or self._thoughts_in
        usage = answer.usage
        segment = Segment("policy", (), reported=usage.output if usage else 0)
        stop: CompletionStop = "length" if answer.finish in ("length", "max_tokens") else "stop_token"
        return Reply((segment,), answer.message, stop, usage.input if usage else 0)

    @property
    def notes(self) -> list[str]:
        """What was sent and spent so far."""
        return [f"{self.settings.model}: {self._requests.note()}"]

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": chat_messages(request.messages, self.system, self._thoughts_in),
            getattr(self.settings, "limit_name", "max_tokens"): request.max_tokens,
            "seed": request.seed & 0x7FFFFFFF,  # some servers read 32 bits
        }
        if request.tools:
            body["tools"] = chat_tools(request.tools)
        return body | self._sampled("stop")

    def _sampled(self, stop: str) -> dict[str, Any]:
        """Keys of a body; what the API does by default is left out, because some models take nothing else."""
        s = self.sampling
        keys = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, stop: list(s.stop)}
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, stop: []}
        return {key: value for key, value in keys.items() if value != usual[key]}

    async def _send(self, body: Mapping[str, Any], request: Request) -> ChatAnswer:
        try:
            text = await self._api.complete(body)
        except Refused as refused:
            raise self._refusal(refused) from None
        try:
            return self._read(text, request)
        except ValueError as error:
            raise Transient(f"malformed answer: {self._api.hidden(str(error))}", charged=True) from None

    def _read(self, text: str, request: Request) -> ChatAnswer:
        return read_answer(text, request.tools)

    def _refusal(self, refused: Refused) -> EngineError | ContextOverflow:
        status, code, words = refused.status, refused.code, str(refused)
        text, variable = hidden(words, ""), self.settings.key_variable or "engine.key_variable"
        if code == NO_MONEY and status == 429:
            return EngineError(f"{text}. The account has no quota left")
        if status in REFUSED:
            overflow = OVERFLOW.search(f"{code} {words}".lower())
            return ContextOverflow(text) if overflow else NoReply(text)
        hints = {
            401: f"the key in {variable} is not accepted",
            403: f"the key in {variable} may not do this",
            404: f"check engine.base_url = {self.settings.base_url} and engine.model = {self.settings.model}",
        }
        return EngineError(f"{text}. {hints.get(status, 'Every request would be refused')}")
