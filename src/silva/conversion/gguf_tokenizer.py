"""A byte-level BPE tokenizer as GGUF holds it: tokens, their kinds, merges, how text is split, special ids.

How text is split before merging is a program in llama.cpp with a name (`tokenizer.ggml.pre`). Which of these
programs does what the tokenizer does is read from its own description; any other one is refused, since it
would cut text into other tokens without an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from silva.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPLITS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "gpt-2": (("ByteLevel", True),),
    "smollm": (("Digits", True), ("ByteLevel", True)),
    "qwen2": (("Split", _QWEN2), ("ByteLevel", False)),
    "llama-bpe": (("Split", _LLAMA3), ("ByteLevel", False)),
}
"""Of llama.cpp's programs, by their names: the steps in tokenizer.json, each with what decides it."""
_DECIDES = {"ByteLevel": "use_regex", "Digits": "individual_digits", "Split": "pattern"}


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Add all that is about the tokenizer.

    Args:
        rows: of the embeddings; those without a token become unused ones.

    Raises:
        ModelError: the tokenizer is of a kind that is not known here, or has more tokens than rows.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, kinds = _tokens(content, rows)
    pairs = content["model"].get("merges") or ()
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in pairs]
    if not merges:
        raise ModelError(f"the tokenizer ({content['model']['type']}) has no merges, which llama.cpp needs")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(content))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for id, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if id is not None:
            add(id)
    begins = tokenizer("")["input_ids"]
    writer.add_add_bos_token(bool(begins) and begins[0] == tokenizer.bos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _split(content: Mapping[str, Any]) -> str:
    """Which of `SPLITS`."""
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    found = tuple((step.get("type"), _decided(step)) for step in steps)
    prefixed = any(step.get("add_prefix_space") for step in steps)
    model = content["model"]["type"]
    name = next((name for name, known in SPLITS.items() if known == found), None)
    if name is None or model != "BPE" or prefixed or content["model"].get("byte_fallback"):
        shown = ", ".join(f"{kind} ({decided})" for kind, decided in found) or "nothing"
        raise ModelError(
            f"the tokenizer is {model} and splits text by {shown}"
            f"{', with a space before it' if prefixed else ''}; for GGUF expected byte-level "
            f"BPE that splits as {', '.join(SPLITS)} do (SmolLM2, Llama 3, Qwen)"
        )
    return name


def _decided(step: Mapping[str, Any]) -> Any:
    value = step.get(_DECIDES.get(step.get("type", ""), ""))
    return value.get("Regex") if isinstance(value, Mapping) else value


def _tokens(content: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    tokens = [f"[PAD{i}]" for i in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    added = {each["content"]: each for each in content["added_tokens"]}
    every = {**content["model"]["vocab"], **{token: each["id"] for token, each in added.items()}}
    if (last := max(every.values())) >= rows:
        raise ModelError(f"the tokenizer has ids up to {last}, and the model has weights for {rows} tokens")
    for token, id in every.items():
        tokens[id] = token
        special = token in added and added[token]["special"]
        kind = (
            TokenType.CONTROL if special else TokenType.USER_DEFINED if token in added else TokenType.NORMAL
        )
        kinds[id] = int(kind)
    return tokens, kinds
