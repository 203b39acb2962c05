"""Our description of the messages, against the SDK's own: what the one writes, the other reads."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from silva.server.tinker import messages
from silva.trainer.tenants import Passed
from silva.wire.guard import HttpError

tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
conv = pytest.importorskip("tinker.proto.response_conv")


def request(data, **kind):
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    datums = [
        types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        for tokens, inputs in data
    ]
    inner = types.ForwardBackwardInput(data=datums, loss_fn=kind.get("loss", "cross_entropy"),
                                       loss_fn_config=kind.get("config"))  # fmt: skip
    asked = types.ForwardBackwardRequest(forward_backward_input=inner, model_id="s:train:0", seq_id=3)
    return forward_backward_request_to_proto(asked).SerializeToString()


def test_a_pass_is_read_as_the_sdk_wrote_it():
    targets, weights = np.array([2, 3], np.int64), np.array([0.5, -1], np.float32)
    wide = np.array([[2, 3], [4, 5]], np.int64), np.array([[0.25, 0.5], [0, 1]], np.float32)
    data = [([1, 2], {"target_tokens": targets, "weights": weights}),
            ([9, 8], {"target_tokens": wide[0], "weights": wide[1]})]  # fmt: skip
    message = messages.parse_pass(request(data, loss="ppo", config={"clip_low_threshold": 0.7}))
    found = messages.pass_of(message)
    assert (found.run, message.seq_id, found.loss, found.backward) == ("s:train:0", 3, "ppo", True)
    assert found.params == {"clip_low_threshold": 0.7}
    assert [datum.tokens.tolist() for datum in found.data] == [[1, 2], [9, 8]]
    assert found.data[0].targets.tolist() == [2, 3] and found.data[1].targets.tolist() == wide[0].tolist()
    assert found.data[0].inputs["weights"].tolist() == [0.5, -1]
    assert found.data[1].inputs["weights"].tolist() == wide[1].tolist()
    assert set(found.data[0].inputs) == {"weights"} and found.data[0].targets.dtype == np.int64


def test_sparse_targets_are_made_dense():
    import torch
    from tinker import types

    dense = torch.zeros(6, 8)
    dense[1, 3], dense[4, 0], dense[4, 7] = 0.5, 1.5, -2
    weights = types.TensorData.from_torch_sparse(dense)
    assert weights.sparse_crow_indices is not None
    tokens = np.zeros((6, 8), np.int64)
    data = [([1] * 6, {"target_tokens": types.TensorData.from_numpy(tokens), "weights": weights})]
    found = messages.pass_of(messages.parse_pass(request(data)))
    assert found.data[0].inputs["weights"].tolist() == dense.tolist()


def test_equal_messages_are_equal_bytes_whatever_the_order_of_their_maps():
    one, other = np.array([1], np.int64), np.array([1], np.float32)
    fields = [("target_tokens", one), ("weights", other)]
    written = [request([([1], dict(order))]) for order in (fields, fields[::-1])]
    first, second = (messages.canonical(messages.parse_pass(each)) for each in written)
    assert first == second


def test_the_sdk_reads_the_result_of_a_pass():
    shapes = [(3,), (1,), (2, 2), (2,)]
    arrays = [
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - n for n, shape in enumerate(shapes)
    ]
    read = conv.deserialize_forward_backward_output(
        messages.passed_bytes(Passed(arrays, {"loss:sum": 1.5, "kl:mean": -2.0}))
    )
    assert read.metrics == {"loss:sum": 1.5, "kl:mean": -2.0}
    got = [each["logprobs"] for each in read.loss_fn_outputs]
    assert [tuple(each.shape) for each in got] == shapes
    assert [each.tolist() for each in got] == [each.tolist() for each in arrays]


def test_the_sdk_reads_what_was_sampled():
    top = np.array([[0, 0], [7, 8]]), np.array([[-99999.0, -99999.0], [-0.5, -1]])
    read = conv.deserialize_sample_response(
        messages.sampled_bytes(
            [((5, 6), (-0.5, -1.5), True, top), ((7,), (-2.0,), False, None)], [np.nan, -3.0], top
        )
    )
    assert [each.topk_logprobs for each in read.sequences] == [[None, [(7, -0.5), (8, -1.0)]], None]
    assert [each.tokens for each in read.sequences] == [[5, 6], [7]]
    assert [each.logprobs for each in read.sequences] == [[-0.5, -1.5], [-2.0]]
    assert [each.stop_reason for each in read.sequences] == ["stop", "length"]
    assert read.prompt_logprobs == [None, -3.0]
    assert read.topk_prompt_logprobs == [None, [(7, -0.5), (8, -1.0)]]


def wrong(**change):
    message = messages.MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    for name, dtype, kind in (("target_tokens", np.int64, 2), ("weights", np.float32, 1)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.array([1, 2], dtype).tobytes(), kind
        tensor.shape.append(2)
    for name, value in change.items():
        if name == "tokens":
            datum.model_input[0].encoded_text.tokens = value
        elif name == "image":
            datum.model_input.add().image.tokens = value
        elif name == "drop":
            del datum.loss_fn_inputs[value]
        elif name == "text":
            message.loss_fn_config_v2["a"].text = value
        else:
            for field, content in value.items():
                tensor = datum.loss_fn_inputs[name]
                if field == "shape":
                    del tensor.shape[:]
                    tensor.shape.extend(content)
                elif field == "sparse":
                    for key, array in content.items():
                        setattr(tensor.sparse_csr, key, array)
                else:
                    setattr(tensor, field, content)
    return message


SPARSE = {"values": np.ones(1, np.float32).tobytes(), "col_indices": np.array([5]).tobytes(),
          "crow_indices": np.array([0, 1, 1]).tobytes()}  # fmt: skip
MORE = {**SPARSE, "crow_indices": np.array([0, 2, 1]).tobytes()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": b"abc"}, "datum 0: got 3 bytes"),
        ({"tokens": b""}, "text tokens only"),
        ({"image": b"png"}, "text tokens only"),
        ({"drop": "target_tokens"}, "target_tokens: got none"),
        ({"text": "mean"}, "got a text"),
        ({"weights": {"dtype": 9}}, "weights: got the type 9"),
        ({"weights": {"shape": [3]}}, "got 2 values in the shape"),
        ({"weights": {"shape": [-1, -2]}}, "got 2 values in the shape"),
        ({"weights": {"shape": [1 << 62, 1 << 62]}}, "got 2 values in the shape"),
        ({"weights": {"dense": b"", "shape": [0, 1 << 62]}}, "got 0 values in the shape"),
        ({"weights": {"dense": np.array([1, np.nan], np.float32).tobytes()}}, "weights: got a value"),
        ({"weights": {"dense": np.array([1, np.inf], np.float32).tobytes()}}, "not finite"),
        ({"target_tokens": {"dtype": 1, "dense": np.ones(2, np.float32).tobytes()}}, "expected int64"),
        ({"weights": {"sparse": SPARSE, "shape": [2, 5]}}, "do not fit"),
        ({"weights": {"sparse": MORE, "shape": [2, 9]}}, "do not fit"),
        ({"weights": {"sparse": SPARSE, "shape": [1 << 40, 1 << 40]}}, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change, says):
    with pytest.raises(HttpError, match=says):
        messages.pass_of(messages.parse_pass(messages.canonical(wrong(**change))))


@pytest.mark.parametrize("data", [b"\xff\xff", b"", b"{}", messages.canonical(wrong())[:-3]])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(HttpError):
        messages.parse_pass(data)


def test_a_body_that_was_compressed_is_opened_up_to_a_size():
    data = bytes(range(256)) * 4000
    frame = zstandard.ZstdCompressor().compress(data)
    assert messages.opened(frame, "zstd") == messages.opened(data, "identity") == data
    assert messages.opened(frame, "zstd", len(data)) == data
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    assert len(bomb) < 1 << 14
    params = zstandard.ZstdCompressionParameters(window_log=24)
    wide = zstandard.ZstdCompressor(compression_params=params).compressobj()
    for body, coding, status, words in (
        (bomb, "zstd", 413, "expected at most 1024000 bytes when it is opened"),
        (frame[:-9], "zstd", 400, "frame of zstd"),
        (frame + b"more", "zstd", 400, "frame of zstd"),
        (frame + frame, "zstd", 400, "frame of zstd"),
        (b"", "zstd", 400, "frame of zstd"),
        (data, "zstd", 400, "no frame of zstd"),
        (wide.compress(data) + wide.flush(), "zstd", 400, "no frame of zstd .*memory"),
        (frame, "gzip", 415, "Content-Encoding: got 'gzip', expected zstd or none"),
        (frame, "zstd, zstd", 415, "expected zstd or none"),
    ):
        with pytest.raises(HttpError, match=words) as found:
            messages.opened(body, coding, len(data))
        assert found.value.status == status
    with pytest.raises(HttpError, match="at most 1023999 bytes"):
        messages.opened(frame, "zstd", len(data) - 1)
