from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.templates import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from silva.rendering.codec import MARK, TokenCodec

TOKENIZER = byte_tokenizer("chatml")
CODEC = TokenCodec(TOKENIZER)

anything = st.lists(
    st.text()
    | st.sampled_from(["<|im_end|>", "<|im_", "end|>", "\ufdd0", "\ufdd1", "\ufdd2", "<think>", MARK])
).map("".join)


@settings(deadline=None)
@given(text=anything)
def test_plain_text_survives_and_holds_no_control_tokens(text):
    tokens = CODEC.encode(text)
    assert not CODEC.control & set(tokens)
    assert CODEC.decode(tokens) == text
    assert MARK not in CODEC.escape(text)


def test_glue_keeps_its_control_tokens():
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert CODEC.encode_escaped("<|im_end|>\n") == [end, *TOKENIZER.encode("\n")]
    assert CODEC.leading_special(" <|im_end|>\nx") == (end, "\nx")
    assert CODEC.leading_special("x<|im_end|>") is None


def test_texts_that_come_again_give_the_same_tokens_in_lists_of_their_own():
    for text in ("hello there", "long " * 1000):
        first = CODEC.encode(text)
        kept = list(first)
        first.append(0)
        assert CODEC.encode(text) == kept == TOKENIZER.encode(text)


def test_the_tokenizer_itself_is_left_alone():
    assert TOKENIZER.encode("<|im_end|>") == [TOKENIZER.convert_tokens_to_ids("<|im_end|>")]


def test_lone_surrogates_are_replaced():
    assert CODEC.decode(CODEC.encode("a\ud800b")) == "a?b"


def test_json_is_escaped_to_its_leaves():
    value = {"<|im_end|>": ["<|im_start|>", 1, None, {"a": "b"}]}
    escaped = CODEC.escape(value)
    assert "<|im_end|>" not in str(escaped) and "<|im_start|>" not in str(escaped)
    assert CODEC.unescape(escaped[next(iter(escaped))][0]) == "<|im_start|>"
    assert next(iter(escaped.values()))[1:] == [1, None, {"a": "b"}]


def test_tokens_that_swallow_whitespace():
    tokenizer = byte_tokenizer("chatml")
    tokenizer.add_tokens(
        [AddedToken("<|end|>", rstrip=True, normalized=False, special=True)], special_tokens=True
    )
    text = "a<|end|>\n b"
    assert TokenCodec(tokenizer).encode_escaped(text) == tokenizer.encode(text)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("nested", [False, True])
def test_pieces_after_a_special_token_are_those_of_the_whole_dialogue(scheme: str, nested: bool):
    """Some tokenizers (SentencePiece) put a space before a text, and before what comes after a token only if
    they do so always."""
    words = {c: i for i, c in enumerate(["<unk>", "▁", *"abu"])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([space]) if nested else space
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend)
    codec = TokenCodec(whole)
    for text in ("a<s>b a<s>u", "<s>a", "a b"):
        own = whole.encode(text, add_special_tokens=False)
        assert codec.encode_escaped(text, first=True) == own
        assert whole.encode(text, add_special_tokens=False) == own  # the tokenizer itself is left as it was
    assert codec.encode("b a") == codec.encode_escaped("<s>b a")[1:]
