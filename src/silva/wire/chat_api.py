"""A chat API of OpenAI's form, or Anthropic's, asked once through the SDK of its maker.

A key is part of no message. Not here: tries and limits (requests.py), and what the answer to a policy's turn
means.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from silva.errors import CapabilityError, EngineError, SilvaError
from silva.ports import derive
from silva.wire.requests import Requests, Transient, hidden, key_of, may_pass, retry_after
from silva.wire.transport import Refused

if TYPE_CHECKING:
    from silva.config.requests import ChatApiSettings

NO_MONEY = "insufficient_quota"
CLIENTS = {"openai": "AsyncOpenAI", "anthropic": "AsyncAnthropic"}
"""The clients, by name of the SDK. One generator makes both, so their errors have the same form."""


class SecondModel:
    """A model that judges or reads for the policy, behind a chat API of OpenAI's form.

    Args:
        section: where its keys stand in the configuration.
        fault: the error, with these words, of a service that gives no answer.

    Raises CapabilityError or ConfigError if the package `openai` or the key is missing.
    """

    def __init__(self, section: str, settings: ChatApiSettings, fault: Callable[[str], SilvaError]) -> None:
        key = key_of(settings.key_variable, f"{section}.key_variable")
        self._api = ChatApi(section, settings.base_url, key, settings.timeout)
        self._requests = Requests(settings.limits, failed=lambda words, _: fault(words))
        self._settings, self._fault = settings, fault

    async def ask(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **more: Any) -> str:
        """What it says; "" for an answer of another form."""
        wanted = self._settings
        body = {"model": wanted.model, "messages": messages, wanted.limit_name: max_tokens, **more}
        seed = derive(0, json.dumps(body))
        try:
            answer = await self._requests.call(lambda: self._api.complete(body), seed=seed)
        except Refused as refused:
            raise self._fault(str(refused)) from None
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            return ""
        return text if isinstance(text, str) else ""


class ChatApi:
    """The client. Each event loop has connections of its own.

    Args:
        section: where the keys of the configuration stand, in messages: "engine".
        sdk: the package that asks, one of `CLIENTS`.

    Raises:
        CapabilityError: it is missing.
    """

    def __init__(self, section: str, base_url: str, key: str, timeout: float, *, sdk: str = "openai") -> None:
        try:
            self._sdk = importlib.import_module(sdk)
        except ImportError as error:
            raise CapabilityError(
                f"[{section}] needs the package {sdk}: pip install 'silva[{sdk}]'"
            ) from error
        self._section, self._base_url, self._key, self._timeout = section, base_url, key, timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reach(self) -> None:
        """One request that costs nothing, before many are tried again and again.

        Raises:
            EngineError: nobody answers at the address.
        """
        try:
            await self._client().models.with_raw_response.list()
        except self._sdk.APIConnectionError as error:
            if "Connect" in type(error.__cause__).__name__:
                why = self.hidden(str(error.__cause__))
                address = f"{self._section}.base_url = {self._base_url}"
                raise EngineError(f"{address}: nobody answers ({why})") from None
        except self._sdk.APIError:
            pass  # an answer, even if it knows no list of models

    async def complete(self, body: Mapping[str, Any]) -> str:
        """The text of the answer, of whatever form it is.

        Raises:
            Transient: it may pass if the request is sent again.
            Refused: it will not; the words are whole.
        """
        client, limit = self._client(), asyncio.timeout(self._timeout)
        try:
            async with limit:
                if self._sdk.__name__ == "anthropic":
                    # Its newest SDK has no argument for a temperature, which older models take.
                    named = {key: body[key] for key in ("model", "messages", "max_tokens")}
                    others = {key: value for key, value in body.items() if key not in named}
                    response = await client.messages.with_raw_response.create(**named, extra_body=others)
                else:
                    response = await client.chat.completions.with_raw_response.create(**body)
        except self._sdk.APIStatusError as error:
            raise self._refusal(error) from None
        except self._sdk.APIConnectionError as error:
            cause = error.__cause__
            why = self.hidden(f"{type(cause).__name__}: {cause}" if cause else str(error))
            # The request has not reached anybody if there was no connection.
            raise Transient(
                f"connection to {self._base_url}: {why}", charged="Connect" not in type(cause).__name__
            ) from None
        except TimeoutError:
            if not limit.expired():
                raise
            late = f"no answer within {self._section}.timeout = {self._timeout:g} s"
            raise Transient(late, charged=True) from None
        return str(response.http_response.text)

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._connected.close()
        self._loop = None

    def hidden(self, text: str) -> str:
        return hidden(text, self._key)

    def _refusal(self, error: Any) -> Transient | Refused:
        status, body, message = error.status_code, error.body, str(error.message)
        if isinstance(body, Mapping) and isinstance(inner := body.get("error"), Mapping):  # Anthropic's
            body, message = inner, str(inner.get("message", message))
        code = str(body.get("code")) if isinstance(body, Mapping) else ""
        if isinstance(body, Mapping) and body.get("detail"):  # FastAPI's
            message = str(body["detail"])
        message = message.removeprefix(f"Error code: {status} - ")
        if may_pass(status) and (status, code) != (429, NO_MONEY):
            text = f"HTTP {status}: {self.hidden(message)}"
            return Transient(text, after=retry_after(error.response.headers))
        return Refused(f"HTTP {status}: {hidden(message, self._key, len(message))}", status, code=code)

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._connected = getattr(self._sdk, CLIENTS[self._sdk.__name__])(
                api_key=self._key or "none",  # the SDK wants one
                base_url=self._base_url,
                timeout=self._timeout,
                max_retries=0,  # its pauses are random
            )
        return self._connected
