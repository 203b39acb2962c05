"""What is tried on a model when it is loaded: Silva must train and sample what transformers would run.

Two short sequences with a common beginning go through the model twice; the last states must agree:

    own       with the family's own attention, and so to its own logits, which `logits_of` must give as well
    packed    as a trie, as in training

The local engine adds its own way, over its cache (engines/local/check.py). What only shows far from the
beginning (windows, positions that change with the length) is not seen here; the context is cut where it
begins (loading.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from silva.errors import ModelError, one_line
from silva.models import trie, trie_attention
from silva.models.head import logits_of
from silva.models.memory import is_out_of_memory
from silva.models.weight_files import is_finite

if TYPE_CHECKING:
    from silva.models.loading import LoadedModel

LENGTH = 8  # tokens of a sequence, half of them common
TOLERANCE = 3e-5  # of the size of the states; SmolLM2 differs by 1e-6
HALF_TOLERANCE = 0.1  # of 16-bit models; SmolLM2 in bfloat16 differs by 0.025, a deeper model by more


def check_model(loaded: LoadedModel) -> None:
    """Refuse a model that Silva would run otherwise than transformers does.

    Raises:
        ModelError: the ways above disagree, or one of them fails.
    """
    refuse(loaded, _disagreement)


@torch.no_grad()
def refuse(loaded: LoadedModel, disagreement: Callable[[LoadedModel], str | None]) -> None:
    """Raise what `disagreement` says of the model, or its failure, as a ModelError with the model's name."""
    about = f"model.name = {loaded.name!r}: this model of the family {loaded.model.config.model_type}"
    try:
        wrong = disagreement(loaded)
    except ModelError as error:
        raise ModelError(f"{about} cannot be used: {error}") from error
    except Exception as error:  # a family may fail in any way where it is not like the others
        if is_out_of_memory(error):
            raise
        text = one_line(str(error), 300)
        raise ModelError(
            f"{about} does not run with Silva's attention and cache ({type(error).__name__}: {text}); "
            "expected a decoder whose layers are alike and let their attention be replaced"
        ) from error
    if wrong:
        raise ModelError(f"{about} {wrong}")


def _disagreement(loaded: LoadedModel) -> str | None:
    """In words, with the gap."""
    tokens = sequences(loaded)
    own, logits = own_states(loaded.model, tokens)
    if not (is_finite(own) and is_finite(logits)):
        return (
            f"gives NaN or infinity for {tokens.numel()} random tokens although its weights are finite; "
            f"expected numbers: {loaded.dtype} may be too narrow, take another model.dtype"
        )
    run = loaded.division.run
    if gap := apart(run(lambda: _packed(loaded, tokens)), own):
        alone = run(lambda: loaded.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state)
        if gap_alone := apart(alone, own):
            return (
                f"gives other states with Silva's attention than with its own {gap_alone}: Silva takes "
                "models whose attention is plain and causal"
            )
        return (
            f"gives other states to a sequence with another one beside it {gap}: Silva takes models whose "
            "tokens see each other through attention alone"
        )
    if gap := apart(run(lambda: logits_of(loaded.model, own)), logits):
        return (
            f"gives other logits than its head on its last states {gap}: Silva knows logits_scaling, "
            "logit_scale and final_logit_softcapping, and nothing else behind a head"
        )
    return None


def misfit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """How a tokenizer does not fit a model, in words; empty if it does.

    Only what no text becomes may lack weights: transformers adds padding and unknown tokens of its own.
    """
    rows = min(m.weight.shape[0] for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    unused = {tokenizer.pad_token, tokenizer.unk_token} - {tokenizer.eos_token}
    used = ((token, number) for token, number in tokenizer.get_vocab().items() if token not in unused)
    token, last = max(used, key=lambda pair: pair[1])
    if last < rows:
        return ""
    return (
        f"the tokenizer has ids up to {last} ({token!r}), and the model has weights for {rows} tokens, 0 to "
        f"{rows - 1}; take the tokenizer that the model was trained with, or resize the model to this one"
    )


def apart(found: torch.Tensor, expected: torch.Tensor) -> str:
    """By how much, in words; empty if they agree as well as their dtype allows."""
    tolerance = HALF_TOLERANCE if expected.dtype in (torch.bfloat16, torch.float16) else TOLERANCE
    gap = gap_of(found, expected)
    return "" if gap <= tolerance else f"(by {gap:.2g} of their size, expected at most {tolerance:g})"


def sequences(loaded: LoadedModel) -> torch.Tensor:
    """[2, T] int64, the same every time: two sequences that part in the middle."""
    length = min(LENGTH, loaded.context)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, length))
    tokens[1, : length // 2] = tokens[0, : length // 2]
    return torch.from_numpy(tokens).to(loaded.device)


def gap_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Size of the difference over the size of what was expected; 0 if equal, infinity for NaN."""
    if torch.equal(found, expected):  # zeros as well, of a head that starts at 0
        return 0.0
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    gap = float(difference / torch.linalg.vector_norm(expected.double()))
    return gap if gap == gap else float("inf")


def _packed(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[2, T, H], in two passes: what a layer has kept must be what the next one looks at."""
    made = trie.build(list(tokens.cpu().numpy()), least=1)
    ids, positions = (torch.from_numpy(x)[None].to(loaded.device) for x in (made.tokens, made.positions))
    states, kept = [], dict[int, dict[int, trie_attention.KeyValue]]()
    for chunk in trie_attention.chunks(made, -(-len(made) // 2)):
        packed = trie_attention.TrieAttention(chunk, kept, dtype=loaded.dtype, device=loaded.device)
        own = slice(chunk.start, chunk.stop)
        states.append(
            loaded.model.get_decoder()(
                input_ids=ids[:, own], position_ids=positions[:, own], use_cache=False, packed=packed
            ).last_hidden_state[0]
        )
        kept |= packed.found
    return torch.cat(states)[torch.from_numpy(np.stack(made.rows)).to(loaded.device)]


def own_states(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states [2, T, H] and logits [2, T, V] of transformers alone.

    With "eager", the only attention of transformers that computes whatever a family adds to it.
    """
    states: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_hook(
        lambda module, given, output: states.append(output.last_hidden_state)
    )
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(ours)
        hook.remove()
    return states[0], logits
