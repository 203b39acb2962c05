"""Text that grows token by token, and the bytes of tokens, whatever a tokenizer's decoder does."""

from __future__ import annotations

import random

import pytest
from tests.rendering.templates import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from silva.rendering.codec import TokenCodec
from silva.rendering.growing import GrowingText, before

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁a", "▁", "é", "▁▁", "x", "##y", "</w>", "b</w>", "."]


def codec(decoder: object) -> TokenCodec:
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate([*BYTES, *WORDS])}, "x"))
    backend.decoder = decoder
    return TokenCodec(PreTrainedTokenizerFast(tokenizer_object=backend))


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
CODECS = {
    "byte level": TokenCodec(byte_tokenizer("chatml")),
    "llama": codec(LLAMA),
    "metaspace": codec(decoders.Metaspace()),
    "word pieces": codec(decoders.WordPiece("##", cleanup=False)),
    "suffixes": codec(decoders.BPEDecoder()),
}


def replies(name: str, count: int) -> list[list[int]]:
    """Random tokens, many of which are parts of characters or unknown."""
    rng = random.Random(name)
    found = []
    for _ in range(count):
        reply: list[int] = []
        for _ in range(rng.randrange(12)):
            if name in ("byte level", "llama") and rng.random() < 0.5:
                data = rng.choice(["é", "😀", "漢", "a"]).encode()[rng.choice([0, 0, 0, 1]) :]
                spelled = [t for t in range(256) for b in data if CODECS[name].bytes_of(t) == bytes([b])]
                by_byte = {CODECS[name].bytes_of(t): t for t in spelled}
                reply += [by_byte[bytes([b])] for b in data]
            else:
                low = 0 if name == "byte level" else 256
                reply.append(rng.randrange(low, 256 + len(WORDS)) if rng.random() < 0.9 else 5000)
        found.append(reply)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_a_text_grows_to_what_its_tokens_say(name: str) -> None:
    decoder, grown = CODECS[name], 0
    for reply in replies(name, 300):
        whole, growing, seen = decoder.decode(reply), GrowingText(decoder), ""
        for token in reply:
            growing.add([token])
            assert growing.text.startswith(seen) and whole.startswith(growing.text), reply
            grown += growing.text != seen
            seen = growing.text
        in_run = [decoder.is_byte(token) for token in reply if decoder.exists(token)][-1:] == [True]
        assert in_run or set(whole[len(seen) :]) <= {"\ufffd"}
    assert grown > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte level", "llama"])
def test_bytes_of_tokens_give_the_text(name: str) -> None:
    decoder, parts = CODECS[name], 0
    for reply in replies(name, 300):
        pieces = [decoder.bytes_of(token, reply[:place]) for place, token in enumerate(reply)]
        joined = b"".join(pieces)
        parts += sum(len(piece) == 1 and piece >= b"\x80" for piece in pieces)
        if "\ufffd" not in (text := decoder.decode(reply)):
            assert joined.decode() == text, reply
    assert parts > 500


@pytest.mark.parametrize(
    ("text", "known"),
    [("abc", "abc"), ("ab<", "ab"), ("ab<st", "ab"), ("ab<stop>c", "ab"), ("ab<stx", "ab<stx"), 
     ("abn", "abn"), ("<<stop>", "<"), ("a\n", "a"), ("a\n\nb", "a")],
)  # fmt: skip
def test_a_stop_string_is_held_back_until_it_is_clear_that_it_does_not_begin(text: str, known: str) -> None:
    assert before(text, ("<stop>", "\n\n")) == known
