"""What a request asks of the places of its prompt, beside the log-probabilities of the prompt's own tokens.

    engine.score ──logits of some places──> PromptPlaces.read ──> what the answer has of them

Two things: log-probabilities of other tokens that the request names, and tokens that are drawn in place of
the prompt's. Row n of both is about token n + 1, for the first one has nothing before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from silva.ports import derive, uniform
from silva.server.tinker.bodies import SampleBody, TargetsBody
from silva.server.tinker.messages import csr_rows, tensor_of
from silva.wire.guard import HttpError

if TYPE_CHECKING:
    from google.protobuf.message import Message


class PromptPlaces:
    """Numbers of one request, complete when its prompt has been scored from `start` on.

    Args:
        tokens: of the prompt.
        seed: of what is drawn; each place and each draw has a random number of its own.

    Attributes:
        start: the first token whose place has to be read; None if the request asks for nothing.

    Raises:
        HttpError: what the request names does not fit the prompt or the vocabulary.
    """

    def __init__(self, asked: SampleBody, tokens: Sequence[int], vocabulary: int, seed: int) -> None:
        rows, self._k = len(tokens) - 1, asked.prompt_alt_tokens_k
        self._named = named = asked.target_prompt_logprobs
        self._temperature = asked.sampling_params.temperature
        self._seeds = [derive(seed, "place", number) for number in range(self._k)]
        self._tokens = np.zeros((rows, self._k), np.int64)
        self._token_logprobs = np.zeros((rows, self._k), np.float32)
        nothing: np.ndarray = np.zeros(0, np.int64)
        self._ids, self._rows = (nothing, nothing) if named is None else _cells(named, rows)
        if self._ids.max(initial=-1) >= vocabulary:
            raise HttpError(400, f"target_prompt_logprobs: got the token {self._ids.max()}, expected less "
                                 f"than {vocabulary}")  # fmt: skip
        self._logprobs = np.zeros(len(self._ids), np.float32)
        wanted = self._rows[self._ids >= 0]
        if named is not None and not len(wanted):
            raise HttpError(400, "target_prompt_logprobs: got no token, expected one or more")
        firsts = [*([0] if self._k and rows else []), *([int(wanted.min())] if len(wanted) else [])]
        self.start = min(firsts) + 1 if firsts else None

    def read(self, logits: torch.Tensor, first: int) -> None:
        """Take [n, V] logits, those of token `first` and of the next ones."""
        logprobs, row = logits.log_softmax(-1), first - 1
        cells = np.flatnonzero((self._ids >= 0) & (self._rows >= row) & (self._rows < row + len(logits)))
        self._logprobs[cells] = logprobs[self._rows[cells] - row, self._ids[cells]].cpu().numpy()
        if self._k:
            drawn = self._drawn(logits, np.arange(row, row + len(logits)))
            here = slice(row, row + len(logits))
            self._tokens[here] = drawn.cpu().numpy()
            self._token_logprobs[here] = logprobs.gather(1, drawn).cpu().numpy()

    @property
    def named(self) -> Message | None:
        """Log-probabilities of the tokens that the request names, in its layout; 0 where it names none."""
        named = self._named
        if named is None:
            return None
        pointers, columns = named.sparse_crow_indices, named.sparse_col_indices
        sparse = None if pointers is None or columns is None else (pointers, columns)
        return tensor_of(self._logprobs, named.shape, sparse)

    @property
    def drawn(self) -> tuple[Message, Message] | None:
        """[n, k] tokens, and their log-probabilities at temperature 1."""
        if not self._k:
            return None
        tokens, logprobs = self._tokens, self._token_logprobs
        return tensor_of(tokens, tokens.shape), tensor_of(logprobs, logprobs.shape)

    def _drawn(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """[n, k] tokens: where the cumulative distribution of a row passes a random number."""
        if self._temperature == 0:
            return logits.argmax(-1, keepdim=True).expand(-1, self._k)
        upto = (logits.double() / self._temperature).softmax(-1).cumsum(-1)
        numbers = np.stack([uniform(seed, rows) for seed in self._seeds], axis=1)
        passed = logits.new_tensor(numbers, dtype=upto.dtype) * upto[:, -1:]
        # Never a token of probability 0 at the end, whatever is rounded.
        last = (upto < upto[:, -1:]).sum(-1, keepdim=True)
        return torch.searchsorted(upto, passed, right=True).minimum(last)


def _cells(named: TargetsBody, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that are named, -1 for none, and the row of each."""
    where, shape = "target_prompt_logprobs", named.shape
    if shape[0] != rows:
        raise HttpError(
            400, f"{where}: got {shape[0]} rows, expected {rows}, one less than the prompt has tokens"
        )
    ids = np.array(named.data, np.int64)
    pointers, columns = named.sparse_crow_indices, named.sparse_col_indices
    if (pointers is None) != (columns is None):
        raise HttpError(400, f"{where}: expected both sparse_crow_indices and sparse_col_indices, or neither")
    if pointers is None or columns is None:
        if len(ids) != shape[0] * shape[1]:
            raise HttpError(400, f"{where}: got {len(ids)} values in the shape {list(shape)}")
        return ids, np.arange(len(ids)) // max(shape[1], 1)
    indices = np.array(pointers, np.int64), np.array(columns, np.int64)
    return ids, csr_rows(*indices, len(ids), shape, where)
