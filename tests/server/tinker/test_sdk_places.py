"""What the SDK gets of single places of prompts and answers. The numbers are those of the doubles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.server.tinker.client import Client

from silva.server.parsing import read
from silva.server.tinker import messages
from silva.server.tinker.bodies import SampleBody
from silva.server.tinker.places import PromptPlaces
from silva.wire.guard import HttpError

tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
ONE = types.SamplingParams(max_tokens=1, seed=4)


@pytest.fixture(scope="module")
def sampler(client):
    return client.create_sampling_client(base_model="base").result()


def named(tokens, make=types.TensorData.from_torch, **options):
    return make(torch.tensor(tokens, dtype=torch.int64), **options)


def test_log_probabilities_of_other_tokens(sampler):
    """32 of the 64 tokens are alike, from the prompt's own on, and the others are impossible."""
    tensor = named([[-1, -1], [7, 38], [39, -1]])
    found = sampler.sample(PROMPT, 1, ONE, target_prompt_logprobs=tensor).result()
    alike = -math.log(32)
    expected = np.float32([[0, 0], [alike, alike], [alike, 0]])
    np.testing.assert_allclose(found.target_prompt_logprobs.to_torch(), expected, rtol=1e-6)
    assert found.prompt_logprobs is None

    sparse = named([[-1] * 9, [-1] * 9, [40, 8, *[-1] * 7]], types.TensorData.from_torch_sparse, pad_value=-1)
    assert sparse.sparse_crow_indices == [0, 0, 0, 2]
    both = sampler.sample(PROMPT, 1, ONE, include_prompt_logprobs=True, prompt_logprobs_last_n=2,
                          target_prompt_logprobs=sparse).result()  # fmt: skip
    got = both.target_prompt_logprobs
    assert (got.shape, got.sparse_crow_indices, got.sparse_col_indices) == ([3, 9], [0, 0, 0, 2], [0, 1])
    np.testing.assert_allclose(got.data, [-math.inf, alike], rtol=1e-6)
    assert both.prompt_logprobs == [None, None, -7.0, -8.0]


def test_tokens_are_drawn_in_place_of_those_of_a_prompt(sampler):
    def drawn(params, k, prompt=PROMPT):
        found = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=k).result().prompt_alt_tokens
        return found.tokens.to_torch(), found.logprobs.to_torch()

    tokens, logprobs = drawn(ONE, 20)
    assert tokens.shape == (3, 20) and len(set(tokens[0].tolist())) > 8
    for row, first in zip(tokens.tolist(), (6, 7, 8), strict=True):
        assert set(row) <= {token % 64 for token in range(first, first + 32)}
    np.testing.assert_allclose(logprobs, np.full((3, 20), -math.log(32)), rtol=1e-6)
    assert drawn(ONE, 20)[0].tolist() == tokens.tolist()
    assert drawn(types.SamplingParams(max_tokens=1, seed=5), 20)[0].tolist() != tokens.tolist()
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    assert drawn(greedy, 2)[0].tolist() == [[6, 6], [7, 7], [8, 8]]
    assert drawn(ONE, 2, types.ModelInput.from_ints([5]))[0].shape == (0, 2)


def test_the_likeliest_tokens_in_place_of_sampled_ones(sampler):
    params = types.SamplingParams(max_tokens=2)
    found = sampler.sample(PROMPT, 2, params, topk_sample_logprobs=2).result()
    assert [each.topk_logprobs for each in found.sequences] == [
        [[(9, -0.5), (10, -1.5)], [(10, -0.5), (11, -1.5)]]
    ] * 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 21}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": named([[1]])}, "got 1 rows, expected 3"),
        ({"target_prompt_logprobs": named([[-1]] * 3)}, "got no token, expected one or more"),
        ({"target_prompt_logprobs": named([[1], [2], [64]])}, "got the token 64, expected less than 64"),
        ({"target_prompt_logprobs": types.TensorData(
            data=[1], dtype="int64", shape=[3, 1], sparse_crow_indices=[0, 2, 1, 1], sparse_col_indices=[0])},
         "indices do not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(asked, words, sampler):
    with pytest.raises(tinker.TinkerError, match=words):
        sampler.sample(PROMPT, 1, ONE, **asked).result()


async def test_how_many_prompt_tokens_are_scored_says_nothing_of_named_ones(service):
    """The SDK does not send this."""
    named = {"data": [-1, -1, 8], "dtype": "int64", "shape": [3, 1]}
    async with service.asked() as http:
        mine = await Client(http).begin()
        made = await mine.post("/create_sampling_session", session_id=mine.session, sampling_session_seq_id=0,
                               base_model="base")  # fmt: skip
        asked = await mine.post(
            "/asample", sampling_session_id=made.json()["sampling_session_id"], seq_id=0,
            prompt={"chunks": [{"tokens": [5, 6, 7, 8]}]}, sampling_params={"max_tokens": 1},
            prompt_logprobs_last_n=9, target_prompt_logprobs=named,
        )  # fmt: skip
        found = await mine.post("/retrieve_future", request_id=asked.json()["request_id"])
    output = messages.MESSAGES["SampleResponse"]()
    output.ParseFromString(found.content)
    expected = [0, 0, -math.log(32)]
    np.testing.assert_allclose(np.frombuffer(output.target_prompt_logprobs.dense, np.float32), expected, 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": [1, 2]}, r"got 2 values in the shape \[3, 1\]"),
        ({"data": [-2] * 3}, "greater than or equal to -1"),
        ({"dtype": "float32"}, "int64"),
        ({"shape": [3]}, "shape"),
        ({"shape": [3, 1 << 40]}, "shape"),
        ({"sparse_crow_indices": [0, 1, 2, 3]}, "expected both sparse_crow_indices and"),
        ({"data": [1], "sparse_crow_indices": [0, 0, 0, 1], "sparse_col_indices": [1]}, "indices do not fit"),
    ],
)
def test_tensors_that_no_sdk_sends_are_refused(change, words):
    tensor = {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1], **change}
    body = {"sampling_session_id": "a", "seq_id": 1, "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]},
            "sampling_params": {}, "target_prompt_logprobs": tensor}  # fmt: skip
    with pytest.raises(HttpError, match=words):
        PromptPlaces(read(SampleBody, body), [5, 6, 7, 8], 64, 0)
