"""Requests that have said the same so far: one computes, the others draw from what it finds.

    row 0   prompt | the answer is 4 |      computed: a sibling that has ended
    row 1   prompt | the answer is _        follows row 0: what comes after "is" is known
    row 2   prompt | the sum _              computes: nobody has this text
    row 3   prompt | the sum _              follows row 2, and draws from the same logits with its own seed

A follower's row has its tokens alone; keys, values and outputs stay where they are. Once it draws a token
that nobody has, it copies them and computes from then on: a text that nobody has will not become anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from silva.engines.local.drafts import LOOKAHEAD
from silva.engines.local.kv_cache import CacheRow, KvCache
from silva.engines.local.request import EngineRequest, is_ready, row_of, source_of


def follow(cache: KvCache, requests: Sequence[EngineRequest]) -> None:
    """Find for each request, whose last token is not computed, the row that knows it or is the first to."""
    computing = {row_of(r).index for r in requests if r.computes}
    for request in requests:
        row = row_of(request)
        if request.computes or (request.source is not None and _has(request.source, row, computing)):
            continue
        planned, known = cache.prefixes(row.tokens, row.adapter)
        known[row.index] = 0
        best = int(known.argmax())
        leader = next((index for index in computing if planned[index] == row.length), None)
        if known[best] == row.length:
            request.source = cache.rows[best]
        elif leader is not None:
            request.source = cache.rows[leader]
        else:
            request.source, request.computes = None, True
            computing.add(row.index)
            if known[best] > row.computed:
                cache.copy(cache.rows[best], row, int(known[best]))


def look_ahead(followers: Sequence[EngineRequest]) -> None:
    """Give those whose source knows more what it says as drafts, which cost no computing."""
    for request in followers:
        source, params, length = source_of(request), request.params, row_of(request).length
        if source.computed <= length:  # most of them: what is here counts in a small model's step
            continue
        most = min(LOOKAHEAD, source.computed - length, params.max_tokens - len(request.tokens) - 1)
        draft = source.tokens[length : length + max(0, most)].tolist()
        ends = (place for place, token in enumerate(draft) if token in params.stop_token_ids)
        request.draft = draft[: next(ends, None)]  # after the last token of a reply nothing is drawn


def hand_on(computing: Sequence[EngineRequest], followers: Sequence[EngineRequest]) -> None:
    """Give those who follow one of these, which compute now, its draft as well."""
    drafts = {row_of(each).index: each.draft for each in computing if each.draft}
    for request in followers if drafts else ():
        if not is_ready(request):
            request.draft = drafts.get(source_of(request).index, [])


def _has(source: CacheRow, row: CacheRow, computing: set[int]) -> bool:
    """Whether the source has all of the row's tokens, and has computed them or is about to."""
    return (
        source.adapter == row.adapter
        and source.length >= row.length
        and (source.computed >= row.length or source.index in computing)
        and np.array_equal(source.tokens[: row.length], row.tokens)
    )
