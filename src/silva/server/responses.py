"""OpenAI's `/v1/responses` as a form of chat completions: items in and out, with streams, tools and thoughts.

Nothing is stored: each request brings its whole dialogue, as clients do that send items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from silva.server.forms import DECIDED, ApiForm, call_of, listed, own_tools, text_in
from silva.server.parsing import HARMLESS, shown
from silva.wire.guard import HttpError

KNOWN = {"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream",
         "stream_options", "previous_response_id"}  # fmt: skip


def asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        HttpError: something in it has no counterpart.
    """
    if unknown := sorted(body.keys() - KNOWN - DECIDED - HARMLESS):
        raise HttpError(400, f"{unknown[0]}: unknown field, expected one of {', '.join(sorted(KNOWN))}")
    if body.get("previous_response_id") is not None:
        raise HttpError(
            400, "previous_response_id: nothing is stored here; send the items of the whole dialogue"
        )
    instructions = text_in(body.get("instructions"), "instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for number, item in enumerate(listed(body, "input")):
            _add(messages, item, f"input.{number}")
    chat: dict[str, Any] = {"messages": messages, "max_tokens": body.get("max_output_tokens"),
                            "model": body.get("model"), "stream": body.get("stream") or False}  # fmt: skip
    if body.get("tools"):
        chat["tools"] = own_tools(body, "function", "parameters")
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = "none" if body["tool_choice"] == "none" else "auto"  # nothing forces a call
    if chat["stream"]:
        chat["stream_options"] = {"include_usage": True}
    return {key: value for key, value in chat.items() if value is not None}


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Items of one reply are one message: its thoughts, its text, its calls."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call_output":
        text = text_in(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
        _reply(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        kinds = ("summary_text", "reasoning_text")
        thoughts = [text_in(item.get(part), f"{where}.{part}", kinds) for part in ("summary", "content")]
        _reply(messages)["reasoning_content"] = "".join(thoughts)
    elif kind == "message" and item.get("role") == "assistant":
        reply = _reply(messages)
        reply["content"] = (reply["content"] or "") + text_in(item.get("content"), f"{where}.content")
    elif kind == "message":
        messages.append(
            {"role": item.get("role"), "content": text_in(item.get("content"), f"{where}.content")}
        )
    else:
        raise HttpError(
            400, f"{where}: got an item of type {shown(kind)}, expected a message or a function call"
        )


def _reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that goes on, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def answer(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    (choice,) = chat["choices"]
    message, id = choice["message"], chat["id"]
    output: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        output.append(_reasoning(id, message["reasoning_content"]))
    if message.get("content"):
        output.append(_said(id, message["content"]))
    output += [_called(call) for call in message.get("tool_calls") or ()]
    return _response(request, chat, output, choice["finish_reason"], chat["usage"])


def _response(
    request: Mapping[str, Any],
    chat: Mapping[str, Any],
    output: list[dict[str, Any]],
    finish: str | None,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`finish`: why it ended; None: it goes on."""
    cut = finish == "length"
    status = "in_progress" if finish is None else "incomplete" if cut else "completed"
    return {
        "id": chat["id"].replace("chatcmpl-", "resp_"), "object": "response", "created_at": chat["created"],
        "status": status, "model": request.get("model") or "", "output": output, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.get("instructions"), "metadata": request.get("metadata") or {},
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": list(request.get("tools") or ()),
        "temperature": None, "top_p": None, "usage": usage and _usage(usage),
    }  # fmt: skip


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _reasoning(id: str, text: str) -> dict[str, Any]:
    return {"id": f"rs_{id}", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def _said(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}] if status == "completed" else []
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _called(call: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    function = call["function"]
    return {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": status,
            "name": function["name"], "arguments": function["arguments"]}  # fmt: skip


class ResponseEvents:
    """The events of a stream: items one after the other, each with its beginning, its parts and its end."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request, self._number = request, -1
        self._output: list[dict[str, Any]] = []
        self._kind, self._text = "", ""  # of the item that goes on
        self._call: dict[str, Any] = {}
        self._finish: str | None = None

    def of(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for event in self._of(chunk):
            self._number += 1
            yield {**event, "sequence_number": self._number}

    def _of(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        id = chunk["id"]
        if self._number < 0:
            begun = _response(self._request, chunk, [], None, None)
            yield {"type": "response.created", "response": begun}
            yield {"type": "response.in_progress", "response": begun}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
                if delta.get(name):
                    yield from self._begin(id, kind)
                    self._text += delta[name]
                    yield self._part(id, "delta", delta=delta[name])
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    yield from self._end(id)
                    self._kind, self._call, self._text = "function_call", dict(call), ""
                    yield self._item("added", _called(call, "in_progress"))
                if arguments := call["function"]["arguments"]:
                    self._text += arguments
                    yield self._part(id, "delta", delta=arguments)
            if choice["finish_reason"] is not None:
                self._finish = choice["finish_reason"]
                yield from self._end(id)
        if chunk.get("usage"):
            whole = _response(self._request, chunk, self._output, self._finish, chunk["usage"])
            yield {"type": f"response.{whole['status']}", "response": whole}

    def _begin(self, id: str, kind: str) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self._end(id)
        self._kind, self._text = kind, ""
        if kind == "reasoning":
            yield self._item("added", {"id": f"rs_{id}", "type": "reasoning", "summary": []})
            yield self._about(
                id, "response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""}
            )
        else:
            yield self._item("added", _said(id, "", "in_progress"))
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._about(id, "response.content_part.added", part=part)

    def _end(self, id: str) -> Iterator[dict[str, Any]]:
        if self._kind == "reasoning":
            part = {"type": "summary_text", "text": self._text}
            yield self._part(id, "done", text=self._text)
            yield self._about(id, "response.reasoning_summary_part.done", part=part)
            item = _reasoning(id, self._text)
        elif self._kind == "message":
            item = _said(id, self._text)
            yield self._part(id, "done", text=self._text)
            yield self._about(id, "response.content_part.done", part=item["content"][0])
        elif self._kind:
            function = {**self._call["function"], "arguments": self._text}
            item = _called({**self._call, "function": function})
            yield self._part(id, "done", arguments=self._text, name=function["name"])
        else:
            return
        yield self._item("done", item)
        self._output.append(item)
        self._kind = ""

    def _part(self, id: str, what: str, **content: Any) -> dict[str, Any]:
        names = {"reasoning": "reasoning_summary_text", "message": "output_text"}
        name = names.get(self._kind, "function_call_arguments")
        more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return self._about(id, f"response.{name}.{what}", **content, **more)

    def _about(self, id: str, type: str, **content: Any) -> dict[str, Any]:
        """An event of the item that goes on."""
        if self._kind == "function_call":
            return {
                "type": type,
                "item_id": f"fc_{self._call['id']}",
                "output_index": len(self._output),
                **content,
            }
        place = {"summary_index": 0} if self._kind == "reasoning" else {"content_index": 0}
        prefix = "rs" if self._kind == "reasoning" else "msg"
        return {
            "type": type,
            "item_id": f"{prefix}_{id}",
            "output_index": len(self._output),
            **place,
            **content,
        }

    def _item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": len(self._output), "item": item}


RESPONSES = ApiForm(asked, answer, ResponseEvents)
