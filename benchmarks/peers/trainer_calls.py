"""Hook of schemathesis: a generated object becomes the bytes that a trainer takes (see hostile_trainer.py).

Runs in the environment of schemathesis, which has no Silva. Arrays follow every call; a record names them by
number. Some fit a sample and the others do not.
"""

import json
import math
import struct
from typing import Any

import schemathesis

ROW = (8,)
ARRAYS = [
    ("I64", ROW, "<8q", [65, 66, 67, 68, 69, 70, 71, 72]),  # tokens
    ("F32", ROW, "<8f", [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]),  # weights of the loss
    ("F64", ROW, "<8d", [-0.5] * 8),  # log-probabilities and their like
    ("F64", ROW, "<8d", [1.0] * 8),  # temperatures
    ("I64", ROW, "<8q", [0] * 8),  # versions
    ("I64", ROW, "<8q", [2**62] * 8),
    ("I64", ROW, "<8q", [-1] * 8),
    ("F64", ROW, "<8d", [math.nan] * 8),
    ("F64", ROW, "<8d", [math.inf, -math.inf] * 4),
    ("F64", ROW, "<8d", [0.0] * 8),
    ("I64", (0,), "<", []),
    ("I64", (2, 4), "<8q", [65] * 8),
    ("BOOL", ROW, "<8?", [False, True] * 4),
    ("U8", ROW, "<8B", [65] * 8),
    ("F16", ROW, "<8e", [0.5] * 8),
    ("I64", (), "<q", [65]),
]


def safetensors() -> bytes:
    head, data = dict[str, Any](), b""
    for number, (kind, shape, form, values) in enumerate(ARRAYS):
        content = struct.pack(form, *values)
        head[str(number)] = {
            "dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]
        }  # fmt: skip
        data += content
    line = json.dumps(head).encode()
    return struct.pack("<Q", len(line)) + line + data


TAIL = safetensors()


@schemathesis.serializer("application/octet-stream")  # type: ignore[untyped-decorator]
def call(context: Any, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, dict):
        return str(value).encode(errors="surrogatepass")
    method = value.get("method")
    line = json.dumps({"record": value.get("record"), "turns": []}).encode()
    name = b"" if method is None else str(method).encode(errors="surrogatepass") + b"\n"
    return name + line + b"\n" + TAIL
