"""Resources servers of NeMo-Gym, against a server of its endpoints (as its `simple_agent` calls them)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from tests.environments.foreign.playing import call, first_task, played, wrong
from tests.tools.web_server import Reply, Request, serving

from silva.environments.foreign.nemo_gym import NemoGym, NemoGymFault, messages_of, response_of
from silva.errors import ConfigError
from silva.types import Message, ToolCall

pytest.importorskip("httpx2", reason="pip install httpx2")
WEATHER = {
    "type": "function", "name": "get_weather", "description": "The weather of a city.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


def row(number: int) -> dict:
    return {
        "responses_create_params": {
            "input": [
                {"role": "developer", "content": "Use the tool."},
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": f"How is the weather in city {number}?"}],
                },
            ],
            "tools": [WEATHER],
        },
        "expected": f"cold {number}",
    }


@contextlib.contextmanager
def running(fault: str = "") -> Iterator[tuple[str, list[Request]]]:
    """The weather of a city is known to a session that was seeded with its row."""
    sessions: dict[str, dict] = {}

    def script(number: int, request: Request) -> Reply:
        body, cookie = request.body, request.headers.get("cookie", "")
        if fault == request.path:
            return Reply({"detail": "boom"}, 500)
        if request.path == "/seed_session":
            name = f"session={len(sessions)}"
            sessions[name] = body
            return Reply({}, headers={"Set-Cookie": f"{name}; Path=/"})
        if request.path == "/get_weather":
            if set(body) != {"city"}:
                return Reply({"detail": "city: Field required"}, 422)
            return Reply({"weather": sessions[cookie]["expected"]})
        last = body["response"]["output"][-1]
        text = last["content"][0]["text"] if last["type"] == "message" else ""
        right = text.strip() == sessions[cookie]["expected"]
        told = {**body, "reward": float(right), "length": len(text)}
        return Reply(told | json.loads(fault if fault.startswith("{") else "{}"))

    with serving(script) as server:
        yield server.url, server.requests


@pytest.fixture
def path(tmp_path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row(n)) for n in range(40)))
    return str(file)


def test_a_dialogue_with_a_tool_call_is_verified(path) -> None:
    with running() as (url, requests):
        settings = NemoGym(url=url, path=path, eval_size=4)
        task = first_task(settings)
        expected = task.data["row"]["expected"]
        first, steps = played(settings, call("get_weather", city="here"), f"<think>Cold.</think>{expected}")
    assert [(m.role, m.content) for m in first.messages] == [
        ("system", "Use the tool."), ("user", f"How is the weather in city {expected.split()[1]}?")
    ]  # fmt: skip
    assert first.tools[0].name == "get_weather" and first.tools[0].parameters == WEATHER["parameters"]
    assert steps[0].observation.messages[0].content == json.dumps({"weather": expected})
    assert steps[1].rewards == {"reward": 1.0} and steps[1].terminated
    assert steps[1].metrics == {"length": float(len(expected)), "success": 1.0}
    assert [(request.path, request.headers.get("cookie", "")) for request in requests] == [
        ("/seed_session", ""), ("/get_weather", "session=0"), ("/verify", "session=0")
    ]  # fmt: skip
    seeded, asked, verified = (request.body for request in requests)
    assert seeded == task.data["row"] and asked == {"city": "here"}
    assert {key: value for key, value in verified.items() if key != "response"} == task.data["row"]
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "reasoning", "message"]
    called, result = verified["response"]["output"][:2]
    assert called["call_id"] == result["call_id"] and json.loads(called["arguments"]) == {"city": "here"}


def test_a_wrong_answer_and_a_call_that_the_server_refuses(path) -> None:
    with running() as (url, _):
        _, steps = played(NemoGym(url=url, path=path, eval_size=4), call("get_weather", town="x"), "warm")
    assert steps[0].observation.messages[0].content == 'Error: {"detail": "city: Field required"}'
    assert steps[1].rewards == {"reward": 0.0} and steps[1].metrics["success"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("/seed_session", "/seed_session: status 500"),
        ("/verify", "/verify: status 500"),
        ("/get_weather", "/get_weather: status 500"),
        ('{"mask_sample": true, "failure_reason": "the judge is away"}', "nothing: .*the judge is away"),
        ('{"_ng_failure_class": "judge_failed"}', "measured nothing: .*judge_failed"),
        ('{"_ng_terminal": "any other key of theirs"}', "measured nothing: .*any other"),
        ('{"infrastructure_error": "no container"}', "measured nothing: .*no container"),
        ('{"error": "CUDA is away"}', "measured nothing: .*CUDA is away"),
        ('{"error": {"message": "CUDA is away"}}', "measured nothing: .*CUDA is away"),
        ('{"verifier_error": "it timed out", "evaluation_completed": false}', "nothing: .*it timed out"),
        ('{"segale_error": "actor_unavailable"}', "measured nothing: .*actor_unavailable"),
        ('{"evaluation_error": "no module"}', "measured nothing: .*no module"),
        ('{"invalid_judge_response": true}', "measured nothing: .*invalid_judge_response"),
        ('{"failure_reason": "gold_execution_error"}', "measured nothing: .*gold_execution_error"),
        ('{"status": "error", "details": {"stderr": "boom"}}', "measured nothing: .*status"),
        ('{"proof_status": "error"}', "measured nothing: .*proof_status"),
        ('{"instance_config": {"mask_sample": true}}', "measured nothing: .*instance_config"),
        ('{"metadata": {"error": "unknown task_id 3"}}', "measured nothing: .*unknown task_id 3"),
        ('{"reward": null}', None),
        ('{"reward": "0"}', None),
    ],
)
def test_a_server_that_fails_gives_no_result(path, fault, words) -> None:
    kind = NemoGymFault if words else ValueError
    with running(fault) as (url, _), pytest.raises(kind, match=words):
        played(NemoGym(url=url, path=path, eval_size=4), call("get_weather", city="here"), "warm")


@pytest.mark.parametrize(
    "told",
    [
        {"mask_sample": False, "_ng_failure_class": None, "judge_error": ""},
        {"instance_config": {"mask_sample": False}, "failure_reason": "none"},
        {"error_type": "missing_key", "error_message": "no key `a`"},
        {"failure_reason": "no_sql_extracted"},
        {"proof_status": "has_sorry", "error_feedback": "line 3: sorry"},
        {"status": "timeout", "details": {"reason": "too slow"}},
        {"image_tools_error_count": 2, "abs_error": 0.5, "invalid_model_response": True},
        {"expected": "an error"},
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_reply_is_a_reward(path, told) -> None:
    with running(json.dumps(told)) as (url, _):
        _, steps = played(NemoGym(url=url, path=path, eval_size=4), "warm")
    assert steps[0].rewards == {"reward": 0.0}


def test_keys_of_ones_own_server_say_what_is_wrong_with_the_reply(path) -> None:
    with running('{"evaluation_error": "No law found in response."}') as (url, _):
        settings = NemoGym(url=url, path=path, eval_size=4, wrong_reply=("evaluation_error",))
        _, steps = played(settings, "warm")
    assert steps[0].rewards == {"reward": 0.0}


def test_what_the_row_says_is_no_failure_of_the_server(tmp_path) -> None:
    """Rows that `ng_collect_rollouts` wrote have its ids, and a row may ask about an error."""
    told = {"_ng_rollout_id": "t1_r2", "error": "KeyError: 'a'", "metadata": {"error": "x"}}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row(n) | told) for n in range(40)))
    with running() as (url, _):
        _, steps = played(NemoGym(url=url, path=str(file), eval_size=4), "warm")
    assert steps[0].rewards == {"reward": 0.0}


def test_no_server_is_said(path) -> None:
    with running() as (url, _):
        pass
    with pytest.raises(NemoGymFault, match=r"seed_session: \w+Error"):
        played(NemoGym(url=url, path=path, eval_size=4), "warm")


def test_nothing_is_wrong_with_it(path) -> None:
    with running() as (url, _):
        assert wrong(NemoGym(url=url, path=path, eval_size=4, train_size=20)) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, "rows.jsonl:1: responses_create_params: got None, expected an object with `input`"),
        ({"input": []}, "rows.jsonl:1: responses_create_params.input: expected text or messages"),
        ({"input": [{"role": "robot", "content": "x"}]}, "'robot'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, params, words) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"responses_create_params": params}))
    with pytest.raises(ConfigError, match=words):
        NemoGym(url="http://127.0.0.1:1", path=str(file)).taskset()


def test_dialogues_in_the_form_of_the_responses_api() -> None:
    """A malformed call stands in none: its answer has no name; results of calls beside it keep their ids."""
    dialogue = [
        Message("user", "q"),
        Message("assistant", "", tool_calls=(ToolCall("f", {}),), errors=("malformed",)),
        Message("tool", "Error: malformed"),
        Message("tool", "1", name="f"),
        Message("assistant", ""),
    ]
    assert messages_of("Hello") == [("user", "Hello")]
    output = response_of(dialogue, {})["output"]
    assert [(item["type"], item.get("output")) for item in output] == [
        ("function_call", None), ("function_call_output", "1"), ("message", None)
    ]  # fmt: skip
    assert output[2]["content"][0]["text"] == ""
