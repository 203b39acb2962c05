"""What a new user gets wrong: each time one readable message, the documented exit code, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from silva.cli import main

pytestmark = pytest.mark.slow

WORLDS = Path(__file__).parent / "worlds.py"
CONFIG = f"""
name = "bad"
steps = 1

[model]
type = "tiny"
layers = 1
width = 32
context = 64

[[environments]]
type = "{WORLDS}:Parity"

[rollout]
groups_per_step = 2
group_size = 2

[rollout.limits]
max_turn_tokens = 4
max_episode_tokens = 48

[algorithm]
drop_zero_variance = false

[eval]
tasks = 4

[monitoring]
terminal = "plain"
tensorboard = false
report = false
"""


@pytest.fixture
def silva(tmp_path, monkeypatch, capsys):
    """Call the command in a folder that holds bad.toml: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text(CONFIG)

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def rl(silva, *options):
    return silva("rl", "@", "bad.toml", *options)


def metrics(run):
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("evall", ["unknown command 'evall'", "did you mean eval?", "expected rl, orchestrator, trainer"]),
        ("rl", ["silva rl: got no configuration", "silva rl @ configs/"]),
        ("rl @ bad.toml --resum", ["got --resum", "did you mean --resume?"]),
        ("rl @ bad.toml --resume=yes", ["got --resume=yes", "did you mean --resume?"]),
        ("rl @ bad.toml --steps many", ["--steps", "many", "integer"]),
        ("rl @ bad.toml --environments.0.type frozenlake", ["frozenlake", 'did you mean "frozen_lake"?']),
        ("rl @ bad.toml --overwrite --name=", ['--name: name = ""', "not blank"]),
        ("rl @ bad.toml --name ../../evil", ["--name", '"../../evil"', "one folder", "output_dir"]),
        ("rl @ bad.toml --resume --overwrite", ["--resume and --overwrite", "expected one"]),
        ("rl @ bad.toml --rollout.sampling.top_p 0.9", ["rollout.sampling.top_p = 0.9", "eval.sampling"]),
        ("rl @ bad.toml --rollout.sampling.top_k 5", ["rollout.sampling.top_k = 5", "full distribution"]),
        ("rl @ bad.toml --rollout.sampling.temperature 0", ["temperature = 0", "expected > 0"]),
        ("rl @ bad.toml --algorithm.type distillation", ["use_rewards = false", "name another model"]),
        (
            'rl @ bad.toml --algorithm.rollout_correction.reject {"token":[8,0.1]}',
            ["algorithm.rollout_correction", "reject token: got bounds 8.0 and 0.1"],
        ),
        (
            "rl @ bad.toml --algorithm.rollout_correction.low 3",
            ["algorithm.rollout_correction", "truncate: got bounds 3.0 and 2.0"],
        ),
        ("sft @ bad.toml", ["got neither of [data] and [warm_start]"]),
        ("sft", ["silva sft: got no configuration"]),
        ("eval @ bad.toml --policy nobody", ["--policy", "'nobody'", "model, expert, random"]),
        ("eval @ bad.toml --policy", ["--policy: got no value", "model, expert, random"]),
        ("eval @ bad.toml --weights nowhere", ["--weights nowhere", "no such file or folder"]),
        ("eval @ bad.toml --weights --json", ["--weights: got no value"]),
        ("eval @ bad.toml --weights . --policy expert", ["scripted play uses no weights"]),
        ("chat ./nowhere", ["./nowhere", "no such folder"]),
        ("chat a b", ["'a b'", "at most one path"]),
        ("envs plya", ["'plya'", "play NAME"]),
        ("envs play", ["got no name"]),
        ("envs play frozen_lake --syze 3", ["--syze", "unknown key", "did you mean size?"]),
        ("doctor now", ["'now'", "--json"]),
        ("schema all", ["'all'", "no arguments"]),
        ("diff a", ["got 1", "two runs"]),
        ("diff nowhere bad.toml", ["nowhere", "cannot be read"]),
    ],
)
def test_wrong_arguments(silva, tmp_path, arguments, words):
    code, out, err = silva(*arguments.split())
    assert (code, out, err[:7]) == (2, "", "silva: ")
    assert [word for word in words if word not in err] == []
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]  # nothing was begun


def test_wrong_line_in_dotenv(silva, tmp_path):
    (tmp_path / ".env").write_text("# secrets\nHF_TOKEN: abc\n")
    code, _, err = rl(silva)
    assert code == 2 and ".env:2" in err and "KEY=VALUE" in err
    assert "abc" not in err  # it may be a secret


def test_crash_point_that_does_not_exist(tmp_path):
    """Read when the process starts, so in a process of its own."""
    (tmp_path / "bad.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "silva", "rl", "@", "bad.toml"],
        env={**os.environ, "SILVA_CRASH": "bakcward:2"}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert "'bakcward'" in done.stderr and "backward" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--model.type pretrained --model.name /nowhere/model",
            ["model.name", "/nowhere/model", "no such folder"],
        ),
        ("--model.type pretrained --model.name ./empty", ["./empty", "no config.json"]),
        ("--model.type pretrained --model.name ./x.gguf", ["x.gguf", "no such GGUF file"]),
        (
            "--algorithm.kl_coef 0.1 --algorithm.reference.name ./empty --warm_start.steps 1000000",
            ["algorithm.reference: ", "./empty", "no config.json"],
        ),
        (
            "--algorithm.kl_coef 0.1 --algorithm.reference.name SmolLM2-135M-Instruct",
            ["algorithm.reference: SmolLM2-135M-Instruct has another vocabulary than tiny"],
        ),
        ("--placement.device cuda", ['placement.device = "cuda"', "no GPU", '"cpu"']),
        (
            "--environments.0.type frozen_lake --environments.0.size 2 --environments.0.eval_size 256",
            ["eval_size is 256", "lower eval_size"],
        ),
    ],
)
def test_what_only_shows_at_the_start_can_be_put_right(silva, tmp_path, options, words):
    import torch

    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "empty").mkdir()
    code, _, err = rl(silva, *options.split())
    assert code == 2
    assert [word for word in words if word not in err] == []
    # The same command with the mistake corrected goes on from there.
    code, _, err = rl(silva)
    assert (code, err) == (0, "")
    assert metrics("runs/bad")[-1]["step"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--environments.0.fails construction --environments.0.share 1",
            "construction: OSError: no such world",
        ),
        ("--environments.0.fails reset --environments.0.share 1", "reset: ValueError: the reset is broken"),
        ("--environments.0.fails step --environments.0.share 1", "step: ValueError: the step is broken"),
        ("--environments.0.paid nan", "reward 'pay' is nan, expected a finite number"),
    ],
)
def test_environment_that_never_works(silva, options, words):
    code, _, err = rl(silva, *options.split())
    assert code == 3 and "episodes failed" in err and words in err


def test_environment_that_fails_at_times_is_counted_and_kept_out(silva):
    code, _, err = rl(
        silva, "--environments.0.share", 0.3, "--rollout.groups_per_step", 6, "--rollout.redo", 0, "--seed", 1
    )
    assert (code, err) == (0, "")
    last = metrics("runs/bad")[-1]
    assert last["trajectories/failed"] == 6 and last["groups/failed"] == 1
    assert last["trajectories/failed"] / last["stop/error"] == pytest.approx(
        14
    )  # a group failed: 12 and 2 more


def test_close_that_raises_spoils_nothing(silva):
    code, _, err = rl(silva, "--environments.0.fails", "close", "--environments.0.share", "1")
    assert (code, err) == (0, "") and metrics("runs/bad")[-1]["trajectories/failed"] == 0


@pytest.mark.parametrize(
    ("longest", "stop", "said"),
    [
        (
            5000, "context_overflow",
            "rollout.limits.max_episode_tokens = 5000 is more than the engine's context of 24 tokens: ... "
            "Lower it to 24, which is all that tiny has",
        ),
        (24, "max_tokens", "max_turn_tokens = 5000 is never reached: max_episode_tokens = 24"),
    ],
)  # fmt: skip
def test_answers_longer_than_context_or_limit_end_there(silva, longest, stop, said):
    limits = ("--rollout.limits.max_turn_tokens", 5000, "--rollout.limits.max_episode_tokens", longest)
    code, _, err = rl(silva, *limits, "--model.context", 24)
    assert (code, err) == (0, "")
    last = metrics("runs/bad")[-1]
    assert last[f"stop/{stop}"] > 0.5 and last["trajectories/failed"] == 0
    assert last["rollout/response_tokens"] < 24
    text = Path("runs/bad/run.log").read_text()
    assert all(part in text for part in said.split(": ... "))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.context", "leaves no room in a context of 6"),
        ("rollout.limits.max_episode_tokens", "expected fewer than rollout.limits.max_episode_tokens = 6"),
    ],
)
def test_a_prompt_longer_than_context_or_limit_is_named(silva, key, said):
    code, _, err = rl(silva, f"--{key}", 6)
    assert code == 3 and said in err


@pytest.mark.parametrize(("tasks", "played"), [(5000, "all of which"), (2, "of which 2")])
@pytest.mark.parametrize("command", [("rl",), ("rl", "--dry-run"), ("eval",)], ids=" ".join)
def test_how_many_held_out_tasks_are_played_is_said(silva, capsys, command, tasks, played):
    code, out, err = silva(
        command[0], "@", "bad.toml", *command[1:], "--eval.tasks", tasks, "--environments.0.eval_size", 4
    )
    said = " ".join(f"{out} {err}".split())
    assert code == 0 and said.count("4 held-out tasks, ") == 1
    assert f"4 held-out tasks, {played} are played at each evaluation (eval.tasks = {tasks})" in said


def test_micro_batch_smaller_than_a_row_is_fine(silva):
    code, _, err = rl(silva, "--trainer.micro_batch_tokens", 1)
    assert (code, err) == (0, "") and metrics("runs/bad")[-1]["groups/trained"] == 2


@pytest.mark.parametrize("folder", ["file", "file/deeper"])
def test_a_file_in_place_of_the_output_folder(silva, tmp_path, folder):
    """A folder without write permission cannot be tried as root, who may write anywhere."""
    (tmp_path / "file").write_text("precious")
    code, _, err = rl(silva, "--output_dir", folder)
    assert code == 2 and "file" in err and "there is a file in its place" in err
    assert (tmp_path / "file").read_text() == "precious"


def test_folder_of_something_else_is_left_alone(silva, tmp_path):
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "thesis.tex").write_text("precious")
    for option in ([], ["--overwrite"], ["--resume"]):
        code, _, err = rl(silva, *option)
        assert code == 2 and "not a run of Silva" in err
    assert [path.name for path in (tmp_path / "runs" / "bad").iterdir()] == ["thesis.tex"]


@pytest.fixture
def two_steps(silva, tmp_path):
    """A finished run with two checkpoints."""
    assert rl(silva, "--steps", 2, "--checkpoint.every", 1, "--no-checkpoint.keep_best")[0] == 0
    return tmp_path / "runs" / "bad"


def more(silva, *options):
    return rl(silva, "--steps", 3, "--checkpoint.every", 1, "--no-checkpoint.keep_best", "--resume", *options)


def test_resume_by_name_alone(silva, two_steps):
    origins = "".join(line for line in (two_steps / "config.toml").open() if "bad.toml:" in line)
    assert silva("rl", "--resume", "--name", "bad", "--steps", 3)[0] == 0
    assert [m["step"] for m in metrics(two_steps)] == [0, 1, 2, 3]
    saved = (two_steps / "config.toml").read_text()
    assert all(line in saved for line in origins.splitlines() if not line.startswith("name"))
    code, _, err = silva("rl", "--resume", "--name", "worse")
    assert code == 2 and "there is no run in runs/worse" in err and "environments" not in err


def damage(checkpoint):
    file = next(path for path in sorted(checkpoint.rglob("*.safetensors")))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


def test_run_that_exists_is_not_touched_unasked(silva, two_steps):
    before = (two_steps / "metrics.jsonl").read_bytes()
    code, _, err = rl(silva)
    assert code == 2 and "--resume" in err and "--overwrite" in err and "finished, 2 steps" in err
    assert (two_steps / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--model.type pretrained --model.name ./empty", "no config.json"),
        ("--environments.0.type mine.py:Mine", "environment Mine: its taskset() raised KeyError: 'words'"),
        (
            "--environments.0.type frozen_lake --environments.0.size 2 --environments.0.eval_size 256",
            "lower eval_size",
        ),
        ("--rollout.sampling.temperature 0", "expected > 0"),
    ],
)
def test_overwrite_with_a_mistake_keeps_the_earlier_run(silva, two_steps, tmp_path, options, word):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text(
        "from silva.environments.settings import EnvironmentSettings\n"
        "class Mine(EnvironmentSettings):\n    def taskset(self):\n        return {}['words']\n"
    )
    before = {path: path.read_bytes() for path in two_steps.rglob("*") if path.suffix}
    code, _, err = rl(silva, "--overwrite", *options.split())
    assert code == 2 and word in err
    assert {path: path.read_bytes() for path in two_steps.rglob("*") if path.suffix} == before
    code, out, err = rl(silva, "--overwrite")
    assert (code, err) == (0, "") and "it is removed when the first step is done" in out
    assert [m["step"] for m in metrics(two_steps)] == [0, 1]


def test_sft_that_fails_keeps_the_earlier_run(silva, two_steps, tmp_path):
    (tmp_path / "empty").mkdir()
    weights = sorted(two_steps.glob("weights/*/*"))
    wrong = ("--model.type", "pretrained", "--model.name", "./empty")
    code, out, _ = silva("sft", "@", "bad.toml", "--overwrite", "--warm_start.steps", 1, *wrong)
    assert code != 0 and "the earlier run is back" in out
    assert sorted(two_steps.glob("weights/*/*")) == weights


def test_overwrite_of_more_than_a_run_is_refused(silva, two_steps):
    (two_steps / "notes.txt").write_text("precious")
    code, _, err = rl(silva, "--overwrite")
    assert code == 2 and "holds more than a run of Silva (notes.txt)" in err
    assert (two_steps / "notes.txt").read_text() == "precious" and (two_steps / "checkpoints").is_dir()


def test_damaged_checkpoint_is_passed_over_by_name(silva, two_steps):
    name = damage(two_steps / "checkpoints" / "step_2")
    code, out, err = more(silva)
    assert (code, err) == (0, "")
    assert "passed over" in out and "step_2" in out and name in out
    assert [m["step"] for m in metrics(two_steps)] == [0, 1, 2, 3]


def test_no_checkpoint_left_whole(silva, two_steps):
    for step in (1, 2):
        damage(two_steps / "checkpoints" / f"step_{step}")
    code, _, err = more(silva)
    assert code == 1 and "no checkpoint of this run is whole" in err and "--overwrite" in err
    assert "step_1" in err and "step_2" in err
    assert sorted(path.name for path in (two_steps / "checkpoints").glob("step_*")) == ["step_1", "step_2"]


def test_resume_with_another_model_names_the_key(silva, two_steps):
    code, _, err = more(silva, "--model.width", "64")
    assert code == 2 and "model.width: was 32, now 64" in err


def test_resume_without_the_ledger(silva, two_steps):
    (two_steps / "ledger.jsonl").unlink()
    code, _, err = more(silva)
    assert code != 0 and "ledger.jsonl" in err and (two_steps / "checkpoints" / "step_2").is_dir()


def test_weights_of_a_run_that_has_none(silva, two_steps):
    """Its newest checkpoint has the same."""
    code, exported, _ = silva("eval", "--json", "--weights", two_steps)
    shutil.rmtree(two_steps / "weights")
    assert code == 0 and silva("eval", "--json", "--weights", two_steps)[:2] == (0, exported)
    code, _, err = silva("eval", "--weights", f"{two_steps}@step_7")
    assert code == 2 and "has step_1, step_2; none is marked best" in err
    shutil.rmtree(two_steps / "checkpoints")
    code, _, err = silva("eval", "@", "bad.toml", "--weights", two_steps)
    assert code == 2 and "no weights" in err
