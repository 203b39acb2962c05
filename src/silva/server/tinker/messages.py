"""The service's protobuf messages: a request to compute a pass, and the results of passes and of sampling.

The description below is our own, of what the SDK 0.38 sends and reads (its `tinker_public.proto` is not
published). So a server needs the `protobuf` package alone and not the SDK, and it stands in a pool of its
own: a process may import both. Fields that are not described here are kept as unknown ones and never read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from silva.trainer.tenants import Datum, Pass, Passed
from silva.wire.guard import HttpError

TAKES = "application/x-protobuf"
MAX_BODY = 64 << 20
"""Bytes of one request, opened or not: the SDK cuts calls into parts of 5 MB, but never a datum."""
WINDOW = 8 << 20  # bytes that a decompressor has to remember (RFC 9659)
PIECE = 1024  # bytes that are opened at once: 32 MiB at most
DATUMS = 1024  # of one request; the SDK cuts its calls there too
DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}
PACKAGE = "silva_tinker"
SCHEMA = """
SampleResponse: 1 sequences *SampledSequence; 2 prompt_logprobs bytes; 3 topk_prompt_logprobs TopkLogprobs; \
5 target_prompt_logprobs Tensor; 6 prompt_alt_tokens PromptAltTokens
PromptAltTokens: 1 tokens Tensor; 2 logprobs Tensor
SampledSequence: 1 stop_reason int32; 2 tokens bytes; 3 logprobs bytes; 4 topk_sampled_logprobs TopkLogprobs
TopkLogprobs: 1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32
SparseCsr: 1 values bytes; 2 crow_indices bytes; 3 col_indices bytes
Tensor: 1 dense bytes; 2 sparse_csr SparseCsr; 3 dtype int32; 4 shape *int64
BatchedTensor: 1 data bytes; 2 offsets bytes; 3 dtype int32; 4 trailing_shape *int64
ArrayRecord: 1 type_tag string; 2 fields map BatchedTensor; 3 num_datums int64
ForwardBackwardOutput: 1 loss_fn_output_type string; 2 loss_fn_outputs *ArrayRecord; 3 metrics map double
ForwardBackwardRequest: 1 model_id string; 2 seq_id int32; 3 data *Datum; 4 loss_fn string; \
5 loss_fn_config map double; 6 forward_only bool; 7 loss_fn_config_v2 map LossConfigValue
LossConfigValue: 1 number double; 2 text string
Datum: 1 model_input *Chunk; 2 loss_fn_inputs map Tensor
Chunk: 1 encoded_text EncodedText; 2 image EncodedText; 3 dmel EncodedText
EncodedText: 1 tokens bytes
"""
"""`*`: repeated; `map`: of strings to these."""


def _described() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="silva_tinker.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def add(message: Any, number: str, name: str, kind: str, repeated: bool = False) -> None:
        field = message.field.add(name=name, number=int(number))
        field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        if kind[0].isupper():
            field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        else:
            field.type = getattr(kinds, f"TYPE_{kind.upper()}")

    for line in SCHEMA.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for number, field, kind in (each.split(" ", 2) for each in fields.split("; ")):
            if not kind.startswith("map "):
                add(message, number, field, kind.removeprefix("*"), kind.startswith("*"))
                continue
            entry = "".join(word.capitalize() for word in field.split("_")) + "Entry"
            nested = message.nested_type.add(name=entry)
            nested.options.map_entry = True
            add(nested, "1", "key", "string")
            add(nested, "2", "value", kind.removeprefix("map "))
            add(message, number, field, f"{name}.{entry}", True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = re.findall(r"^(\w+):", SCHEMA, re.MULTILINE)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in names}


MESSAGES = _described()


def opened(data: bytes, coding: str, most: int = MAX_BODY) -> bytes:
    """A body as it was before it was compressed.

    Args:
        coding: "zstd", as the SDK sends it, or "identity" for none.
        most: bytes of it.

    Raises:
        HttpError: another coding, more bytes, or what is no single frame of zstd.
    """
    if coding == "identity":
        return data
    if coding != "zstd":
        raise HttpError(415, f"Content-Encoding: got {coding[:99]!r}, expected zstd or none")
    found, size = list[bytes](), 0
    try:
        frame = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        for start in range(0, len(data), PIECE):
            found.append(frame.decompress(data[start : start + PIECE]))
            size += len(found[-1])
            if size > most:
                raise HttpError(
                    413, f"the body is too large, expected at most {most} bytes when it is opened"
                )
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body is no frame of zstd ({error})") from None
    if not frame.eof or frame.unused_data:
        raise HttpError(400, "the body is no single, whole frame of zstd")
    return b"".join(found)


def parse_pass(data: bytes) -> Any:
    """The message of a pass.

    Raises:
        HttpError: it is none.
    """
    message: Any = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise HttpError(400, "the body is no ForwardBackwardRequest in protobuf") from None
    if not message.model_id:
        raise HttpError(400, "model_id: got none")
    if message.seq_id < 1:
        raise HttpError(400, f"seq_id: got {message.seq_id}, expected 1 or more")
    if not 1 <= len(message.data) <= DATUMS:
        raise HttpError(400, f"data: got {len(message.data)} datums, expected 1 to {DATUMS}")
    return message


def canonical(message: Any) -> bytes:
    """Bytes that are equal for equal messages, in whatever order a client wrote its maps."""
    return bytes(message.SerializeToString(deterministic=True))


def pass_of(message: Any) -> Pass:
    """What a message asks for.

    Raises:
        HttpError: names the datum and its field.
    """
    params = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.text:
            raise HttpError(400, f"loss_fn_config: {name}: got a text, expected a number")
        params[name] = value.number
    data = [_datum(datum, f"datum {number}") for number, datum in enumerate(message.data)]
    return Pass(message.model_id, data, message.loss_fn, params, backward=not message.forward_only)


def _datum(datum: Any, where: str) -> Datum:
    if any(not len(chunk.encoded_text.tokens) for chunk in datum.model_input):
        raise HttpError(400, f"{where}: model_input: got a chunk without tokens, expected text tokens only")
    tokens = _numbers(b"".join(chunk.encoded_text.tokens for chunk in datum.model_input), np.int32, where)
    fields = {name: _tensor(value, f"{where}: {name}") for name, value in datum.loss_fn_inputs.items()}
    targets = fields.pop("target_tokens", None)
    if targets is None:
        raise HttpError(400, f"{where}: target_tokens: got none")
    if targets.dtype != np.int64:
        raise HttpError(400, f"{where}: target_tokens: got {targets.dtype}, expected int64")
    for name, value in fields.items():
        if not np.isfinite(value).all():
            raise HttpError(400, f"{where}: {name}: got a value that is not finite")
    return Datum(tokens.astype(np.int64), targets, fields)


def _numbers(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise HttpError(
            400, f"{where}: got {len(data)} bytes, which are no whole number of {np.dtype(dtype)}"
        )
    return np.frombuffer(data, dtype)


def _tensor(tensor: Any, where: str) -> np.ndarray:
    if tensor.dtype not in DTYPES:
        raise HttpError(400, f"{where}: got the type {tensor.dtype}, expected float32, int32 or int64")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    sparse = tensor.HasField("sparse_csr")
    values = _numbers(tensor.sparse_csr.values if sparse else tensor.dense, dtype, where)
    if dtype is np.int32:
        values = values.astype(np.int64)
    if sparse:
        return _dense(tensor.sparse_csr, values, shape, where)
    if not shape:
        return values
    fits = len(shape) <= 2 and min(shape) >= 0 and max(shape) <= max(len(values), 1)
    if not fits or math.prod(shape) != len(values):
        raise HttpError(400, f"{where}: got {len(values)} values in the shape {list(shape)}")
    return values.reshape(shape)


def _dense(csr: Any, values: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    pointers, columns = (_numbers(each, np.int64, where) for each in (csr.crow_indices, csr.col_indices))
    rows = csr_rows(pointers, columns, len(values), shape, where)
    found = np.zeros(shape, values.dtype)
    found[rows, columns] = values
    return found


def csr_rows(
    pointers: np.ndarray, columns: np.ndarray, count: int, shape: Sequence[int], where: str
) -> np.ndarray:
    """The row of each of `count` values of a sparse tensor.

    Raises:
        HttpError: its indices do not fit the shape.
    """
    whole = len(shape) == 2 and min(shape) >= 0 and max(shape) <= 1 << 20 and shape[0] * shape[1] <= 1 << 24
    counts = np.diff(pointers)
    if not (
        whole and len(pointers) == shape[0] + 1 and pointers[0] == 0 and pointers[-1] == len(columns) == count
        and (counts >= 0).all() and (columns >= 0).all() and (columns < shape[1]).all()
    ):  # fmt: skip
        raise HttpError(400, f"{where}: got a sparse tensor whose indices do not fit the shape {list(shape)}")
    return np.repeat(np.arange(shape[0]), counts)


def passed_bytes(passed: Passed) -> bytes:
    """The result of a pass: log-probabilities of each datum, in one record for each number of targets."""
    output: Any = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    arrays = [np.ascontiguousarray(each, np.float32) for each in passed.logprobs]
    start = 0
    for stop in range(1, len(arrays) + 1):  # neighbours of the same trailing shape
        if stop < len(arrays) and arrays[stop].shape[1:] == arrays[start].shape[1:]:
            continue
        part = arrays[start:stop]
        record = output.loss_fn_outputs.add(num_datums=len(part))
        offsets = np.cumsum([0, *(each.nbytes for each in part)]).astype(np.int64)
        field = record.fields["logprobs"]
        field.data, field.offsets, field.dtype = b"".join(map(bytes, part)), offsets.tobytes(), 1
        field.trailing_shape.extend(part[0].shape[1:])
        start = stop
    output.metrics.update(passed.metrics)
    return bytes(output.SerializeToString())


Top = tuple[np.ndarray, np.ndarray]
"""[n, k] tokens and [n, k] log-probabilities: the likeliest ones at each of n places."""


def sampled_bytes(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], bool, Top | None]],
    prompt: Sequence[float] | None,
    top: Top | None,
    named: Message | None = None,
    drawn: tuple[Message, Message] | None = None,
) -> bytes:
    """The result of sampling.

    Args:
        sequences: tokens, their log-probabilities, whether the sequence ended before its limit, and the
            likeliest tokens in their places.
        prompt: log-probabilities of the prompt's tokens, NaN for those that were not asked for.
        top: the likeliest ones at each place of the prompt.
        named, drawn: tensors of places.py.
    """
    output: Any = MESSAGES["SampleResponse"]()
    for tokens, logprobs, stopped, likeliest in sequences:
        output.sequences.add(
            stop_reason=0 if stopped else 1,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
            topk_sampled_logprobs=_top(likeliest),
        )
    if prompt is not None:
        output.prompt_logprobs = np.asarray(prompt, np.float32).tobytes()
    if top is not None:
        output.topk_prompt_logprobs.CopyFrom(_top(top))
    if named is not None:
        output.target_prompt_logprobs.CopyFrom(named)
    if drawn is not None:
        output.prompt_alt_tokens.tokens.CopyFrom(drawn[0])
        output.prompt_alt_tokens.logprobs.CopyFrom(drawn[1])
    return bytes(output.SerializeToString())


def _top(top: Top | None) -> Message | None:
    if top is None:
        return None
    length, k = top[0].shape
    return MESSAGES["TopkLogprobs"](
        token_ids=np.asarray(top[0], np.int32).tobytes(),
        logprobs=np.asarray(top[1], np.float32).tobytes(), k=k, length=length,
    )  # fmt: skip


def tensor_of(
    values: np.ndarray, shape: Sequence[int], sparse: tuple[Sequence[int], Sequence[int]] | None = None
) -> Message:
    """A tensor of float32 or int64. `sparse`: the pointers of its rows and the columns of its values."""
    dtype = next(number for number, each in DTYPES.items() if each == values.dtype)
    if sparse is None:
        return MESSAGES["Tensor"](dense=values.tobytes(), dtype=dtype, shape=shape)
    pointers, columns = (np.array(each, np.int64).tobytes() for each in sparse)
    csr = MESSAGES["SparseCsr"](values=values.tobytes(), crow_indices=pointers, col_indices=columns)
    return MESSAGES["Tensor"](sparse_csr=csr, dtype=dtype, shape=shape)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """As JSON can hold them."""
    return {name: float(value) for name, value in metrics.items() if np.isfinite(value)}
