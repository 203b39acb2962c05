"""Records TRL's own advantages and losses in trl.json, for tests/algorithms/test_trl.py to compare with.

Run once by hand, in an environment that has trl (the test reads only the file):

    pip install trl==1.16.0 && python tests/golden/make_trl.py

The numbers come from real trainers, GRPOTrainer and RLOOTrainer, on a tiny random model, in float64.
Two things are fed to them from outside: completions and rewards (through rollout_func, generation and
the reward function), and per-token log-probabilities in place of the model's, so that they are known.
All that follows, group normalisation, ratio, clipping, KL, entropy, masks, the correction for the
sampler and aggregation, is TRL's.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

GROUP_SIZE = 4
REWARDS = [
    1.0,
    0.0,
    0.25,
    0.0,
    0.5,
    0.5,
    0.5,
    0.5,
    -1.0,
    2.0,
    0.75,
    3.0,
]  # three groups; one without variance
LENGTHS = [5, 3, 1, 4, 2, 6, 3, 3, 6, 1, 4, 2]
LONGEST = 6
# Tokens of the environment inside a completion: they carry no loss.
OBSERVED = {(0, 2), (3, 1), (3, 2), (5, 0), (8, 3), (10, 2)}

LOSS_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "grpo_kl": {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.05, "use_bias_correction_kl": False},
    "grpo_kl_corrected": {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.05, "use_bias_correction_kl": True},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28},
    "bnpo_entropy": {"loss_type": "bnpo", "epsilon": 0.2, "entropy_coef": 0.01},
    "dapo_kl": {"loss_type": "dapo", "epsilon": 0.2, "beta": 0.02, "use_bias_correction_kl": False},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.1},
    "dr_grpo_delta": {"loss_type": "dr_grpo", "epsilon": 0.2, "delta": 1.5},
    "dapo": {"loss_type": "dapo", "epsilon": 0.3, "epsilon_high": 0.5},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
    "gspo_tight": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "cispo_kl": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.03, "use_bias_correction_kl": False},
    **{
        f"{loss['loss_type']}_{mode}": {
            **loss,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": 1.4,
        }
        for loss, mode, low in (
            ({"loss_type": "dapo", "epsilon": 0.2}, "token_truncate", None),
            ({"loss_type": "dapo", "epsilon": 0.2}, "token_mask", 0.7),
            ({"loss_type": "grpo", "epsilon": 0.2}, "sequence_truncate", 0.8),
            ({"loss_type": "cispo", "epsilon_high": 1.3}, "sequence_mask", 0.5),
        )
    },
}  # fmt: skip


def main() -> None:
    torch.set_default_dtype(torch.float64)
    signals = _signals()
    result = {
        "made_by": "tests/golden/make_trl.py",
        "command": "python tests/golden/make_trl.py",
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "group_size": GROUP_SIZE,
        "longest": LONGEST,
        "rewards": REWARDS,
        "mask": _mask().tolist(),
        **{name: value.tolist() for name, value in signals.items()},
        "advantages": {
            "mean_std": _advantages(_grpo(scale_rewards="group")),
            "mean": _advantages(_grpo(scale_rewards="none")),
            "leave_one_out": _advantages(_rloo()),
        },
        "losses": {},
    }
    # The losses take TRL's group-normalised advantages.
    advantages = torch.tensor(result["advantages"]["mean_std"])
    for name, settings in LOSS_CASES.items():
        corrected = "vllm_importance_sampling_mode" in settings
        loss, gradient, metrics = _loss(_grpo(**settings), signals, advantages, corrected=corrected)
        result["losses"][name] = {
            "settings": settings,
            "loss": loss,
            "gradient": gradient,
            "metrics": metrics,
        }
    path = Path(__file__).with_name("trl.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path} with trl {trl.__version__}", file=sys.stderr)


def _signals() -> dict[str, torch.Tensor]:
    """Log-probabilities and entropies [B, T], ratios from about 0.4 to 2.5."""
    generator = random.Random(7)

    def table(low: float, high: float) -> torch.Tensor:
        return torch.tensor(
            [[round(generator.uniform(low, high), 6) for _ in range(LONGEST)] for _ in REWARDS]
        )

    logprobs = table(-3.0, -0.1)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - table(-0.9, 0.9),
        "reference_logprobs": logprobs - table(-0.7, 0.7),
        "entropies": table(0.0, 3.0),
        "sampler_logprobs": logprobs - table(-0.9, 0.9),
    }


def _mask() -> torch.Tensor:
    """[B, T] 1 where a token is trained."""
    rows = [[int(t < n and (b, t) not in OBSERVED) for t in range(LONGEST)] for b, n in enumerate(LENGTHS)]
    return torch.tensor(rows)


def _completions() -> dict[str, Any]:
    mask = _mask().tolist()
    return {
        "prompt_ids": [[3, 4] for _ in REWARDS],
        "completion_ids": [[5] * n for n in LENGTHS],
        "env_mask": [row[:n] for row, n in zip(mask, LENGTHS, strict=True)],
        "logprobs": None,
    }


def _reward(completions: list[str], **_: Any) -> list[float]:
    return list(REWARDS)


def _parts() -> dict[str, Any]:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4, "c": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp()  # the trainer loads its reference model from the path of the model
    LlamaForCausalLM(config).save_pretrained(folder)
    return {
        "model": LlamaForCausalLM.from_pretrained(folder),
        "processing_class": tokenizer,
        "reward_funcs": _reward,
        "train_dataset": Dataset.from_dict({"prompt": ["a b"] * (len(REWARDS) // GROUP_SIZE)}),
    }


def _shared() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": len(REWARDS),
        "num_generations": GROUP_SIZE,
        "max_completion_length": LONGEST,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
    }


def _grpo(**settings: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(
        args=GRPOConfig(**_shared(), **settings),
        rollout_func=lambda prompts, trainer: _completions(),
        **_parts(),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _rloo() -> RLOOTrainer:
    trainer = RLOOTrainer(args=RLOOConfig(**_shared(), beta=0.0, normalize_advantages=False), **_parts())
    trainer._generate_single_turn = lambda *_: _completions()["completion_ids"]  # it takes no rollout_func
    return trainer


def _scored(trainer: Any) -> dict[str, torch.Tensor]:
    prompts = [{"prompt": "a b"} for _ in REWARDS]
    trainer.model.train()
    return trainer._generate_and_score_completions(prompts)


def _advantages(trainer: Any) -> list[float]:
    return _scored(trainer)["advantages"].tolist()


def _sampler_ratio(trainer: GRPOTrainer, signals: dict[str, torch.Tensor]) -> torch.Tensor:
    """TRL's weight for a sampler that is not the trainer, [B, T] or [B, 1]; without vLLM, told it has it."""
    rows = zip(signals["sampler_logprobs"].tolist(), LENGTHS, strict=True)
    sampled = {**_completions(), "logprobs": [row[:n] for row, n in rows]}
    trainer.rollout_func = lambda prompts, trainer: sampled
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (signals["old_logprobs"], None, None)
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    return _scored(trainer)["importance_sampling_ratio"]


def _loss(
    trainer: GRPOTrainer, signals: dict[str, torch.Tensor], advantages: torch.Tensor, *, corrected: bool
) -> tuple[float, list[list[float]], dict[str, float]]:
    """TRL's scalar loss, its gradient by log-probability [B, T], and the metrics it logs."""
    ratio = {"importance_sampling_ratio": _sampler_ratio(trainer, signals)} if corrected else {}
    logprobs = signals["logprobs"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, signals["entropies"], None)
    trainer.model.train()
    lengths = torch.tensor([[int(t < n) for t in range(LONGEST)] for n in LENGTHS])
    inputs = {
        "prompt_ids": torch.tensor([[3, 4]] * len(REWARDS)),
        "prompt_mask": torch.ones(len(REWARDS), 2, dtype=torch.long),
        "completion_ids": torch.full((len(REWARDS), LONGEST), 5),
        "completion_mask": lengths,
        "tool_mask": _mask(),
        "advantages": advantages,
        "old_per_token_logps": signals["old_logprobs"],
        "ref_per_token_logps": signals["reference_logprobs"],
        "num_items_in_batch": _mask().sum(),
        **ratio,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    logged = trainer._metrics["train"]
    metrics = {
        name: logged[name][-1]
        for name in ("kl", "entropy", "clip_ratio/region_mean", "cispo_clip_ratio")
        if name in logged
    }
    return loss.item(), logprobs.grad.tolist(), metrics


if __name__ == "__main__":
    main()
