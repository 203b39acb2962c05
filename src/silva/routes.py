"""Routes: which experts of a mixture of experts predicted a token, as small integers.

    tokens    the   answer   is    4
    routes     ?      a       b    c      row i [layers, k]: the experts that the token before token i went to

Row i belongs to the pass in which token i was drawn (or read), as its log-probability does: the last token of
a reply has not been through the model, and the first token of a context has nothing before it. So every token
has one row, and a record of tokens can be cut anywhere. `unknown` marks a row of which nothing is known: no
expert has the largest number that the type holds.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np


def dtype_of(experts: int) -> type[np.uint8] | type[np.uint16]:
    """The narrowest type with a number for each expert, and one more."""
    return np.uint8 if experts < 256 else np.uint16


def unknown(count: int, like: np.ndarray) -> np.ndarray:
    """[count, layers, k] of `like` [., layers, k]."""
    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def after(experts: np.ndarray) -> np.ndarray:
    """From the experts that tokens went to, [T - 1, layers, k], to the routes of these tokens and of the one
    that follows: [T, layers, k]."""
    if experts.dtype == np.uint8 and (experts == 255).any():  # that number is the mark here
        experts = experts.astype(np.uint16)
    return np.concatenate([unknown(1, experts), experts])


def joined(parts: Sequence[tuple[int, np.ndarray | None]]) -> np.ndarray | None:
    """Of consecutive tokens: how many there are, and their routes; None if nothing is known of any."""
    given = [routes for _, routes in parts if routes is not None]
    if not given:
        return None
    like = max(given, key=lambda routes: routes.dtype.itemsize)[:0]
    return np.concatenate([_widened(count, routes, like) for count, routes in parts])


def _widened(count: int, routes: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    if routes is None:
        return unknown(count, like)
    if routes.dtype == like.dtype:
        return routes
    return np.where(routes == np.iinfo(routes.dtype).max, np.iinfo(like.dtype).max, routes.astype(like.dtype))


def signed(routes: np.ndarray) -> np.ndarray:
    """In int32, with -1 for what is unknown."""
    return np.where(routes == np.iinfo(routes.dtype).max, -1, routes.astype(np.int32))


def balance(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """How evenly tokens are spread over experts, as means over layers with experts.

    Args:
        parts: routes of some tokens, at least one of them known.

    Returns:
        The share of all choices that the busiest expert of a layer has (at best 1 / experts, at worst 1 / k),
        and the entropy in nats of these shares (at best log of the experts).
    """
    ids = np.concatenate([signed(part) for part in parts])
    ids = ids[(ids >= 0).all((1, 2))]
    found = []
    for layer in ids.swapaxes(0, 1):
        shares = np.bincount(layer.ravel()) / layer.size
        if layer.shape[1] == 1 or shares.max() <= 1 / layer.shape[1]:  # others are no choices: dense layers
            taken = shares[shares > 0]
            found.append((shares.max(), -(taken * np.log(taken)).sum()))
    busiest, entropy = np.mean(found, 0)
    return float(busiest), float(entropy)


def to_npy(array: np.ndarray) -> bytes:
    """An array with its type and shape, as numpy's files have them."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def of_npy(data: bytes) -> np.ndarray:
    """Raises ValueError for what is no array of numbers."""
    found: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return found


def to_text(array: np.ndarray) -> str:
    """In JSON, as vLLM writes it too: base64 of `to_npy`."""
    return base64.b64encode(to_npy(array)).decode()


def of_text(text: str) -> np.ndarray:
    """[T, layers, k]. Raises ValueError for anything else."""
    try:
        found = of_npy(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(f"no base64 ({error})") from error
    if found.ndim != 3 or found.dtype.kind not in "ui":
        raise ValueError(f"routes of shape {found.shape} and type {found.dtype}, expected [T, layers, k]")
    return found if found.dtype in (np.uint8, np.uint16) else found.astype(np.uint16)
