"""Recipes of tinker-cookbook, unmodified, against `silva serve tinker`: they train to their end.

A folder has what they would download, under the names of the hub: a small model with the tokens of Qwen's
chats, and rows. Runs in .peers/cookbook (`make peers PEERS=cookbook`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from silva.config.sections import TinyModel
from silva.models.tiny import tiny_config, tiny_model, tiny_tokenizer

PYTHON = Path(__file__).parents[3] / ".peers/cookbook/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}: make peers PEERS=cookbook"),
]
MODEL = "Qwen/Qwen3.5-9B"  # the recipe of twenty questions asks this one, and no other, for its answers
RECIPES = {
    "sl_loop": "batch_size=4 max_steps=2 max_length=128 lora_rank=4 save_every=1",
    "rl_loop": "batch_size=2 group_size=4 max_steps=2 max_tokens=4 lora_rank=4",
    "chat_sl.train": "batch_size=4 max_steps=2 max_length=128 lora_rank=4 eval_every=1 save_every=1",
    "preference.dpo.train": "batch_size=4 max_steps=2 max_length=256",
    "prompt_distillation.train":
        "file_path=HuggingFaceH4/no_robots/train.jsonl batch_size=4 max_steps=2 lora_rank=4",
    "math_rl.train":
        "env=arithmetic groups_per_batch=2 group_size=4 max_steps=2 lora_rank=4 compute_post_kl=True",
    "distillation.on_policy_distillation":
        "groups_per_batch=2 group_size=2 max_steps=2 max_tokens=4 lora_rank=4 eval_every=0",
    "multiplayer_rl.guess_number.train": "batch_size=1 group_size=2 max_steps=1 max_tokens=4 eval_every=0",
    "multiplayer_rl.twenty_questions.train":
        "batch_size=1 group_size=2 max_steps=1 max_tokens=4 eval_every=0",
    "multiplayer_rl.text_arena.train":
        "batch_size=2 num_train_datapoints=2 num_test_datapoints=2 max_steps=1 max_tokens=4 eval_every=0",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recipes and server run."""
    found = tmp_path_factory.mktemp("cookbook")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], special_tokens=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny_model(tiny_config(TinyModel(layers=1, context=8192), tokenizer), "eager")
    model.save_pretrained(found / MODEL)
    tokenizer.save_pretrained(found / MODEL)
    sums = [(f"What is {n} + 1?", str(n + 1)) for n in range(8)]
    _rows(found / "openai/gsm8k", [{"question": q, "answer": f"#### {a}"} for q, a in sums])
    _rows(found / "zwhe99/DeepMath-103K", [{"question": q, "final_answer": a} for q, a in sums])
    _rows(found / "HuggingFaceH4/no_robots", [{"messages": _chat(q, a)} for q, a in sums])
    said = "\n\nHuman: {}\n\nAssistant: {}"
    pairs = [{"chosen": said.format(q, a), "rejected": said.format(q, "No.")} for q, a in sums]
    _rows(found / "Anthropic/hh-rlhf", pairs)
    return found


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    splits = ""
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        splits += f"  - split: {split}\n    path: {split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "silva",
        "serve",
        "tinker",
        "--model",
        MODEL,
        "--as",
        MODEL,
        "--port",
        "0",
    ]
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "listening at" in line)
        assert f"tinker: {MODEL}: " in said
        yield said.split()[-1]
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def errors(folder: Path, address: str) -> dict[str, str]:
    """What became of each recipe."""
    environment = {
        **os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-me", "TINKER_TELEMETRY": "0",
        "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    asked = [[name, f"model_name={MODEL}", f"log_path=logs/{name}", *arguments.split()]
             for name, arguments in RECIPES.items()]  # fmt: skip
    ran = subprocess.run(
        [PYTHON, Path(__file__).parent / "cookbook_recipes.py"],
        input="".join(json.dumps(each) + "\n" for each in asked),
        stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
    )  # fmt: skip
    return dict(zip(RECIPES, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_to_its_end(recipe: str, errors: dict[str, str], folder: Path) -> None:
    assert errors[recipe] == ""
    logs = folder / "logs" / recipe
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2 if "max_steps=2" in RECIPES[recipe] else 1))
    *_, last = (json.loads(line) for line in (logs / "checkpoints.jsonl").read_text().splitlines())
    assert last["state_path"].endswith("/weights/final")


def test_what_recipes_say_of_their_training(errors: dict[str, str], folder: Path) -> None:
    """Losses fall, and tokens have the same log-probabilities where they are trained as where they were
    sampled."""

    def metrics(recipe: str) -> list[dict[str, float]]:
        path = folder / "logs" / recipe / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    first, second = metrics("preference.dpo.train")
    assert first["dpo_loss"] == pytest.approx(math.log(2)) and second["dpo_loss"] < first["dpo_loss"]
    first, second = metrics("chat_sl.train")
    assert second["test/nll"] < first["test/nll"]
    first, _ = metrics("distillation.on_policy_distillation")
    assert abs(first["teacher_kl"]) < 1e-6  # it is the teacher, and stays it where equal bits teach nothing
    for recipe in ("math_rl.train", *(name for name in RECIPES if "multiplayer" in name)):
        for line in metrics(recipe):
            assert abs(line["optim/kl_sample_train_v1"]) < 1e-5, recipe
