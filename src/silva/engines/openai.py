"""A model behind a chat API of OpenAI's form, as an actor: plays through messages, for evaluation only.

    fault                                          what becomes of the request
    429, 408, 409, 5xx, cut connection, no answer  sent again, after what Retry-After says; then NoReply
    in time, a body that is no answer
    400, 413, 422, an answer that ended otherwise  NoReply: its episode has no result (`redo`)
    than by itself, its calls or its length
    400: the context is too long                   ContextOverflow: not solved, as with a local model
    429: the account has no money; 401, 403, 404   EngineError: ends the evaluation
    the next request may cost too much             CostLimit: ends the evaluation

No fault ever becomes an answer. Not here: the forms of messages (openai_messages.py), and limits, pauses and
costs (service.py).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from silva.config.sections import Sampling
from silva.engines.openai_messages import Answer, chat_messages, chat_tools, most_tokens, read_answer
from silva.engines.openai_settings import OpenAIEngineSettings
from silva.engines.service import Service, Transient, Usage
from silva.errors import CapabilityError, ConfigError, ContextOverflow, EngineError, NoReply
from silva.ports import CLOCK
from silva.protocols import Reply, Request
from silva.types import CompletionStop, Segment

AGAIN = (408, 409, 429)  # and all from 500
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
SHOWN = 300  # characters of a message of the API


class ChatPolicy:
    """Answers with the model of a chat API.

    Args:
        system: system message for environments that give none.

    Raises:
        CapabilityError: the API cannot sample so, or the package `openai` is missing.
        ConfigError: there is no key.
    """

    reads_tokens: ClassVar[bool] = False

    def __init__(
        self, settings: OpenAIEngineSettings, sampling: Sampling, *, system: str | None = None
    ) -> None:
        for name in ("top_k", "min_p"):
            if getattr(sampling, name):
                raise CapabilityError(
                    f"eval.sampling.{name} = {getattr(sampling, name)}: a chat API has no {name}; expected 0"
                )
        self.settings, self.sampling, self.system = settings, sampling, system
        self._key = _key(settings.key_variable)
        self._client = _client(settings, self._key)
        self._service = Service(settings)
        self._thoughts_in = ""  # the field in which this server gives thoughts, once it has given some

    async def reach(self) -> None:
        """One request that costs nothing, before many are tried again and again.

        Raises:
            EngineError: nobody answers at the address.
        """
        import openai

        try:
            await self._client.models.with_raw_response.list()
        except openai.APIConnectionError as error:
            if "Connect" in type(error.__cause__).__name__:
                why = self._hidden(str(error.__cause__))
                address = f"engine.base_url = {self.settings.base_url}"
                raise EngineError(f"{address}: nobody answers ({why})") from None
        except openai.APIError:
            pass  # an answer, even if it knows no list of models

    async def reply(self, request: Request) -> Reply:
        if request.prefill:
            raise CapabilityError(
                f"environment {request.label!r} begins the answer ({request.prefill!r}), and a chat API "
                "cannot continue it; set prefill = false there"
            )
        body = self._body(request)
        answer = await self._service.call(
            lambda: self._send(body, request),
            tokens=(most_tokens(body), request.max_tokens),
            seed=request.seed,
        )
        if answer.finish not in WHOLE:
            self._service.counts.failed += 1
            raise NoReply(f"the API cut the answer: its finish_reason is {answer.finish!r}")
        self._thoughts_in = answer.thoughts_in or self._thoughts_in
        usage = answer.usage
        segment = Segment("policy", (), reported=usage.output if usage else 0)
        stop: CompletionStop = "length" if answer.finish in ("length", "max_tokens") else "stop_token"
        return Reply((segment,), answer.message, stop, usage.input if usage else 0)

    @property
    def notes(self) -> list[str]:
        """What was sent and spent so far."""
        return [self._service.note()]

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: Request) -> dict[str, Any]:
        """Sampling as the API has it by default is left out: some models take no other."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": chat_messages(request.messages, self.system, self._thoughts_in),
            self.settings.limit_name: request.max_tokens,
            "seed": request.seed & 0x7FFFFFFF,  # some servers read 32 bits
        }
        if request.tools:
            body["tools"] = chat_tools(request.tools)
        if sampling.temperature != 1.0:
            body["temperature"] = sampling.temperature
        if sampling.top_p != 1.0:
            body["top_p"] = sampling.top_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return body

    async def _send(self, body: Mapping[str, Any], request: Request) -> tuple[Answer, Usage | None]:
        import openai

        limit = asyncio.timeout(self.settings.timeout)
        try:
            async with limit:
                response = await self._client.chat.completions.with_raw_response.create(**body)
        except openai.APIStatusError as error:
            raise self._refusal(
                error.status_code, error.response.headers, error.body, error.message
            ) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__
            why = self._hidden(f"{type(cause).__name__}: {cause}" if cause else str(error))
            # The request has not reached anybody if there was no connection.
            raise Transient(
                f"connection to {self.settings.base_url}: {why}",
                charged="Connect" not in type(cause).__name__,
            ) from None
        except TimeoutError:
            if not limit.expired():
                raise
            late = f"no answer within engine.timeout = {self.settings.timeout:g} s"
            raise Transient(late, charged=True) from None
        try:
            answer = read_answer(response.http_response.text, request.tools)
        except ValueError as error:
            raise Transient(f"malformed answer: {self._hidden(str(error))}", charged=True) from None
        return answer, answer.usage

    def _refusal(
        self, status: int, headers: Mapping[str, str], body: object, message: str
    ) -> Transient | EngineError | ContextOverflow:
        code = str(body.get("code")) if isinstance(body, Mapping) else ""
        if isinstance(body, Mapping) and body.get("detail"):  # FastAPI's
            message = str(body["detail"])
        message = message.removeprefix(f"Error code: {status} - ")
        text = f"HTTP {status}: {self._hidden(message)}"
        if status == 429 and code == "insufficient_quota":
            return EngineError(f"{text}. The account has no quota left")
        if status in AGAIN or status >= 500:
            return Transient(text, after=_retry_after(headers))
        if status in REFUSED:
            overflow = OVERFLOW.search(f"{code} {message}".lower())
            return ContextOverflow(text) if overflow else NoReply(text)
        hints = {
            401: f"the key in {self.settings.key_variable or 'engine.key_variable'} is not accepted",
            403: f"the key in {self.settings.key_variable or 'engine.key_variable'} may not do this",
            404: f"check engine.base_url = {self.settings.base_url} and engine.model = {self.settings.model}",
        }
        return EngineError(f"{text}. {hints.get(status, 'Every request would be refused')}")

    def _hidden(self, text: str) -> str:
        """Without the key, which a server may repeat."""
        text = text.replace(self._key, "***") if self._key else text
        return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _key(variable: str) -> str:
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(
            f"engine.key_variable: {variable} is not set; set it in the environment or in .env, or set "
            'engine.key_variable = "" if the API needs no key'
        )
    return key


def _client(settings: OpenAIEngineSettings, key: str) -> Any:
    try:
        import openai
    except ImportError as error:
        raise CapabilityError(
            'engine.type = "openai" needs the package openai: pip install "silva[openai]"'
        ) from error
    return openai.AsyncOpenAI(
        api_key=key or "none",  # the SDK wants one
        base_url=settings.base_url,
        timeout=settings.timeout,
        max_retries=0,  # service.py tries again, and counts
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from `retry-after-ms` or from `retry-after` (a number or a date)."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit)
        except (KeyError, ValueError):
            continue
    try:
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - CLOCK.time())
    except (KeyError, ValueError):
        return None
