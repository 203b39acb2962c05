"""/v1/completions and /score: the engine's own numbers, to the last bit, in the form that clients know."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.running import CONTEXT, MODEL, asking, guarded, run, says

from silva.engines.local.engine import LocalEngine
from silva.ports import derive
from silva.rendering.renderer import Renderer
from silva.types import Completion, SamplingParams

PROMPT = list(range(40, 60))


def post(engine: Any, renderer: Renderer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async def ask() -> Any:
        async with asking(guarded(engine, renderer)) as client:
            answer = await client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    return run(ask())


def complete(engine: Any, renderer: Renderer, **body: Any) -> Any:
    return post(engine, renderer, "/v1/completions", {"prompt": PROMPT, "model": MODEL} | body)


def rebuilt(choice: dict[str, Any]) -> Completion:
    own = choice["silva"]
    return Completion(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        tuple(own["raw_logprobs"]),
        tuple(own["entropies"]),
        tuple(own["versions"]),
        own["stop_reason"],
        own["cached_tokens"],
    )


def sampled(engine: LocalEngine, params: SamplingParams) -> Completion:
    run(engine.sleep())  # forgets its cache, so that it says again how much was cached: nothing
    return run(engine.sample(PROMPT, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, seed=7),
        SamplingParams(12, temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, seed=2**63 - 1),
        SamplingParams(12, temperature=0.0),
        SamplingParams(500, seed=3),
    ],
    ids=["plain", "truncated", "greedy", "up to the end of the context"],
)
def test_a_completion_is_the_engine_s_own_to_the_last_bit(
    engine: LocalEngine, renderer: Renderer, params: SamplingParams
) -> None:
    expected = sampled(engine, params)
    run(engine.sleep())
    body = {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p",
                                                     "seed")}  # fmt: skip
    answer = complete(engine, renderer, **body, logprobs=0, return_token_ids=True, stop_token_ids=[])
    (choice,) = answer["choices"]
    assert rebuilt(choice) == expected
    assert choice["prompt_token_ids"] == PROMPT
    count = len(expected.tokens)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (20, count)
    assert choice["finish_reason"] == "length"
    assert expected.stop_reason == ("context_overflow" if params.max_tokens == 500 else "length")


def test_several_prompts_and_completions_come_in_order_with_seeds_of_their_own(
    engine: LocalEngine, renderer: Renderer
) -> None:
    prompts = [PROMPT, PROMPT[:7]]
    body = {"max_tokens": 4, "stop_token_ids": [], "return_token_ids": True}
    answer = complete(engine, renderer, prompt=prompts, n=3, seed=5, **body)
    seeds = [5, derive(5, "sample", 1), derive(5, "sample", 2)]
    expected = [
        list(run(engine.sample(prompt, SamplingParams(4, seed=seed))).tokens)
        for prompt in prompts
        for seed in seeds
    ]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [PROMPT] * 3 + [PROMPT[:7]] * 3
    assert answer["usage"]["prompt_tokens"] == 27


def test_without_a_seed_no_two_are_equal(engine: LocalEngine, renderer: Renderer) -> None:
    answer = complete(engine, renderer, prompt=[PROMPT] * 4, n=2, max_tokens=16, return_token_ids=True)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 8


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_what_lm_eval_reads(engine: LocalEngine, renderer: Renderer, max_tokens: int) -> None:
    greedy = list(run(engine.sample(PROMPT, SamplingParams(6, temperature=0.0))).tokens)
    texts = [PROMPT + greedy, [*PROMPT, (greedy[0] + 1) % 256, *greedy[1:]]]
    answer = complete(
        engine, renderer, prompt=texts, max_tokens=max_tokens, temperature=0, logprobs=1, seed=1234, echo=True
    )
    for text, choice, is_greedy in zip(texts, answer["choices"], (True, False), strict=True):
        scores = run(engine.score(text, 1))
        found = choice["logprobs"]
        assert found["token_logprobs"][: len(text)] == [None, *scores.logprobs]
        assert found["top_logprobs"][0] is None
        lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        assert {len(found[name]) for name in lists} == {len(text) + max_tokens}
        # As lm-eval's parse_logprobs does, with the last, generated one left out:
        end = len(text)
        mine, top = found["token_logprobs"][20:end], found["top_logprobs"][20:end]
        assert all(x == max(best.values()) for x, best in zip(mine, top, strict=True)) is is_greedy
        assert choice["text"] == "".join(found["tokens"])
        assert found["text_offset"][:3] == [0, 1, 2]


def test_a_text_is_plain_text_and_stops_before_its_stop_string(renderer: Renderer) -> None:
    engine = says(renderer, "one two three")
    answer = complete(engine, renderer, prompt="say <|end|>", echo=True, max_tokens=50)
    assert answer["choices"][0]["text"] == "say <|end|>one two three"  # the end token is no text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert renderer.stop_token_ids[0] not in engine.requests[0][0]


def test_of_several_stop_strings_the_first_to_be_complete_counts(
    engine: LocalEngine, renderer: Renderer
) -> None:
    body = {"max_tokens": 40, "seed": 4, "stop_token_ids": [], "return_token_ids": True}
    (free,) = complete(engine, renderer, **body)["choices"]
    text = free["text"]
    early, late = text[8:10], text[20:23]
    assert (text.index(early), text.index(late)) == (8, 20), "another seed is needed"
    (choice,) = complete(engine, renderer, **body, stop=[late, early])["choices"]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == (text[:8], early, "stop")
    assert choice["silva"]["stop_reason"] == "stop_string"
    assert choice["token_ids"] == free["token_ids"][: len(choice["token_ids"])]


def test_stop_tokens_are_those_of_the_request_or_else_those_of_the_model(renderer: Renderer) -> None:
    end = renderer.stop_token_ids[0]
    engine = says(renderer, "abc")
    for asked, expected, reason in (
        ({}, [end], None),
        ({"stop_token_ids": [renderer.encode("b")[0]]}, renderer.encode("b"), renderer.encode("b")[0]),
        ({"stop_token_ids": []}, [], None),
        ({"ignore_eos": True}, [], None),
    ):
        (choice,) = complete(engine, renderer, max_tokens=50, **asked)["choices"]
        assert list(engine.requests[-1][1].stop_token_ids) == expected
        assert choice["stop_reason"] == reason


def test_scores_are_the_engine_s_own(engine: LocalEngine, renderer: Renderer) -> None:
    expected = run(engine.score(PROMPT, 5))
    found = post(engine, renderer, "/score", {"tokens": PROMPT, "start": 5})
    assert len(found.pop("weights")) == 1
    assert found == {
        "logprobs": list(expected.logprobs),
        "likeliest": list(expected.likeliest),
        "likeliest_logprobs": list(expected.likeliest_logprobs),
        "version": 0,
    }
    assert post(engine, renderer, "/score", {"tokens": PROMPT, "start": 20})["logprobs"] == []
    full = list(range(200)) + list(range(CONTEXT - 200))
    assert len(post(engine, renderer, "/score", {"tokens": full, "start": 1})["logprobs"]) == CONTEXT - 1


def test_a_prompt_that_fills_the_context_is_an_overflow(engine: LocalEngine, renderer: Renderer) -> None:
    for prompt in ([1] * CONTEXT, "a" * CONTEXT, "a" * 32 * CONTEXT + "a"):
        error = post(engine, renderer, "/v1/completions", {"prompt": prompt}, 400)["error"]
        assert (error["type"], error["code"]) == ("ContextOverflow", "context_length_exceeded")
        assert f"a context of {CONTEXT} tokens" in error["message"]
    error = post(engine, renderer, "/score", {"tokens": [1] * (CONTEXT + 1), "start": 1}, 400)["error"]
    assert error["type"] == "ContextOverflow"


def test_fields_that_would_change_the_result_are_refused_and_others_are_not(renderer: Renderer) -> None:
    engine = says(renderer, "yes")
    harmless = {
        "user": "me", "metadata": {"a": 1}, "logit_bias": {}, "presence_penalty": 0.0, "best_of": 1,
        "frequency_penalty": 0, "suffix": None, "response_format": {"type": "text"},
    }  # fmt: skip
    assert complete(engine, renderer, **harmless)["choices"][0]["text"] == "yes"
    for refused in (
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": True},
        {"response_format": {"type": "json_object"}},
        {"best_of": 2},
        {"suffix": "x"},
        {"min_tokens": 3},
        {"temprature": 1},
    ):
        body = {"prompt": PROMPT} | refused
        error = post(engine, renderer, "/v1/completions", body, 400)["error"]
        assert error["type"] == "invalid_request_error" and next(iter(refused)) in error["message"]
    assert post(engine, renderer, "/v1/completions", {"prompt": PROMPT, "model": "gpt-9"}, 404)["error"][
        "code"
    ] == ("model_not_found")


@pytest.mark.parametrize("name", [MODEL, "org/model", "%C3%BC"])
async def test_a_model_is_found_by_its_name(renderer: Renderer, name: str) -> None:
    async with asking(guarded(says(renderer, "yes"), renderer)) as client:
        found, models = await client.get(f"/v1/models/{name}"), (await client.get("/v1/models")).json()
    if name == MODEL:
        assert found.status_code == 200 and found.json() == models["data"][0]
    else:
        assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
