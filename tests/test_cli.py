"""The command line: help, listings, playing, evaluating, talking, and the same from Python."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import silva as package
from silva.cli import main
from silva.commands import COMMANDS
from silva.commands.chat import chat
from silva.commands.common import as_resolved
from silva.config.saved import to_toml
from silva.registries import REGISTRIES

ROOT = Path(__file__).parents[1]
RIVERS = ROOT / "examples" / "own_environment" / "rivers.py"
WORLDS = Path(__file__).parent / "worlds.py"
CONFIG = {
    "name": "small",
    "steps": 1,
    "model": {"type": "tiny", "layers": 1, "width": 32, "context": 128},
    "environments": [{"type": f"{WORLDS}:Parity", "turns": 1}],
    "rollout": {"groups_per_step": 2, "group_size": 2, "limits": {"max_turn_tokens": 4}},
    "algorithm": {"drop_zero_variance": False},
    "eval": {"tasks": 6},
    "monitoring": {"terminal": "plain", "tensorboard": False, "report": False},
}


@pytest.fixture
def silva(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(to_toml(as_resolved(CONFIG)))

    def call(*arguments, code=0):
        capsys.readouterr()
        returned = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert returned == code, err
        return out

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, made from Python with a table of keys."""
    folder = tmp_path_factory.mktemp("trained")
    return package.train(CONFIG | {"output_dir": str(folder)})


def test_overview_names_every_command_and_exit_code(silva):
    text = silva("--help")
    assert text == silva()
    assert [name for name in COMMANDS if f"\n  {name} " not in text] == []
    assert "0 done, 1 the run failed, 2 the input was wrong, 3 training gave up or taught nothing" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_usage_and_an_example(silva, command):
    text = silva(command, "--help")
    assert text.startswith(f"silva {command}: ")
    assert re.search(rf"^usage: +silva {command}\b", text, re.M)
    assert re.search(rf"^example: silva {command}\b", text, re.M)


def test_a_key_may_look_like_an_option(silva):
    """`silva eval` has --output, and every configuration output_dir."""
    given = COMMANDS["eval"].read("eval", ["@", "small.toml", "--output_dir", "elsewhere"])
    assert given.resolve(given.rest).config.output_dir == "elsewhere"


def test_bad_rows_pass_up_to_a_number(silva, capsys):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("rows.jsonl").write_text(f'{json.dumps(good)}\n{{"messages": 7}}\n')
    keys = ("--model.type", "tiny", "--data.sources", '[{"path": "rows.jsonl"}]', "--steps", 2,
            "--name", "bad", "--data.dialogues_per_step", 1)  # fmt: skip
    assert "rows.jsonl:2: messages: got 7" in silva("sft", *keys, "--max-bad-rows", 1)
    assert main(["sft", *map(str, keys), "--overwrite"]) == 2
    assert "rows.jsonl:2: messages: got 7, expected text or messages" in capsys.readouterr().err


def test_options_of_a_command_are_taken_out():
    argv = ["@", "a.toml", "--json", "--seed", "3", "--weights=x", "--policy", "expert", "--json=yes"]
    given = COMMANDS["eval"].read("eval", argv)
    assert given.options == {"--json": "", "--weights": "x", "--policy": "expert"}
    assert given.rest == ["@", "a.toml", "--seed", "3", "--json=yes"]


@pytest.mark.slow
def test_help_of_a_section(silva):
    assert silva("rl", "--help", "trainer.optimizer").startswith("[trainer.optimizer]\n  lr = 1e-5 ")
    assert '[algorithm] type = "ppo"' in silva("eval", "--help", "algorithm.ppo")
    overview, whole = silva("rl", "--help"), silva("rl", "-h", "all")
    assert len(overview.splitlines()) < 80 < 400 < len(whole.splitlines())
    assert silva("rl", "@", "small.toml", "--help") == silva("rl", "--help", "--resume") == overview
    silva("rl", "--help", "trainer.optimiser", code=2)


def test_examples_of_the_help_name_files_that_exist():
    files = [word for each in COMMANDS.values() for word in each.example.split() if word.endswith(".toml")]
    assert files and [file for file in files if not (ROOT / file).is_file()] == []


def test_version(silva):
    assert silva("--version") == f"silva {package.__version__}\n"


def test_environments_listed(silva):
    rows = json.loads(silva("envs", "--json"))
    assert [row["name"] for row in rows if row["settings"].startswith("silva.")] == sorted(
        REGISTRIES.environments
    )
    assert all(row["about"] for row in rows)
    text = silva("envs")
    assert re.search(r"^guess_number +yes +Guess a number from a range.* +nothing +Apache-2.0$", text, re.M)


def test_environment_of_an_installed_package(silva, tmp_path, monkeypatch):
    info = tmp_path / "river_worlds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: river-worlds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[silva.environments]\nriver_lengths = river_worlds:Rivers\nlost = river_worlds:Gone\n"
    )
    (tmp_path / "river_worlds.py").write_text(RIVERS.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        about = {row["name"]: row["about"] for row in json.loads(silva("envs", "--json"))}
        assert (
            about["river_lengths"] == "An environment of your own: questions, and a tool to answer them with."
        )
        assert about["lost"].startswith("cannot be loaded: AttributeError")  # and the others are listed
        monkeypatch.setattr("builtins.input", script("/quit"))
        assert "How many km is the" in silva("envs", "play", "river_lengths")
    finally:
        sys.modules.pop("river_worlds", None)


def script(*lines):
    """An `input` that gives these lines, then the end of input."""
    given = iter(lines)

    def read(prompt=""):
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return read


def test_play_to_the_end(silva, monkeypatch):
    monkeypatch.setattr("builtins.input", script(*["/expert"] * 3))
    text = silva("envs", "play", "guess_number", "--numbers", 3, "--style", "compact")
    assert text.endswith("The episode is over: found 1; success 1\n")


def test_play_a_world_of_ones_own(silva, monkeypatch):
    lines = ['/tool {"river": "Elbe"}', '/tool {"river": "Nile"}', "99999"]
    monkeypatch.setattr("builtins.input", script(*lines))
    text = silva("envs", "play", f"{RIVERS}:Rivers", "--no-tool_required")
    assert "[tool] length: How long a river is, in kilometres." in text
    assert "[tool] 1094\n" in text and "[tool] Error: unknown river 'Nile'; known: Danube" in text
    assert text.endswith("The episode is over: correct 0; success 0\n")


def test_play_ends_with_the_input(silva, monkeypatch):
    monkeypatch.setattr("builtins.input", script())
    assert "Left" in silva("envs", "play", "frozen_lake", "--size", 3)


@pytest.mark.slow
def test_schema_describes_shipped_files(silva):
    schema = json.loads(silva("schema"))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == {"extends", *as_resolved(CONFIG).data}
    types = {variant["properties"]["type"].get("const") for name, variant in schema["$defs"].items()
             if "type" in variant.get("properties", {})}  # fmt: skip
    assert types >= {*REGISTRIES.environments, *REGISTRIES.algorithms, "tiny", "linear", "local"}
    for reference in re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(schema)):
        assert reference in schema["$defs"]
    assert "#:schema ./silva.schema.json" in silva("schema", "--help")


@pytest.mark.slow
def test_doctor(silva):
    findings = json.loads(silva("doctor", "--json"))
    assert findings["silva"] == package.__version__ and findings["packages"]["torch"]
    assert findings["problems"] == [] and findings["torch"]["threads"] >= 1
    assert all(text.startswith(("yes (", "no (")) for text in findings["same bits"].values())
    assert list(findings["same bits"]) == ["float32", "bfloat16", "float64"]
    text = silva("doctor")
    assert re.search(r"^  torch +\d", text, re.M) and text.endswith("ready: nothing is missing\n")


def test_doctor_says_where_bits_do_not_repeat(monkeypatch):
    from silva.commands import doctor
    from silva.models import machine
    from silva.models.same_bits import RowRules

    monkeypatch.setattr(machine, "probe", lambda *_, dtype, **__: RowRules(hold=dtype.itemsize < 8))
    (note,) = [note for note in doctor.examine()["notes"] if "bit for bit" in note]
    assert note.startswith("runs in float64 repeat within rounding here, not bit for bit: ")


def test_doctor_says_what_is_missing(monkeypatch):
    from silva.commands import doctor

    versions = {"torch": None, "peft": None, "tensorboard": None}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    findings = doctor.examine()
    assert [line.split(":")[0] for line in findings["problems"]] == [
        "torch is not installed", "peft is not installed",
    ]  # fmt: skip
    assert findings["notes"] == ['tensorboard is not installed: pip install "silva[tensorboard]"']
    assert "problem: torch is not installed" in doctor.show(findings)


def test_train_from_python(trained):
    assert (trained.summary["steps"], trained.summary["model"]) == (1, "tiny")
    assert trained.summary["eval_after"][0]["n"] == 6
    assert (trained.weights / "config.json").is_file()


def test_train_a_file_inside_a_running_loop(tmp_path, monkeypatch):
    """As in a notebook, whose cells run in a loop."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(to_toml(as_resolved(CONFIG)))

    async def cell():
        return package.train("small.toml")

    outcome = asyncio.run(cell())
    assert outcome.directory == Path("runs/small") and outcome.summary["steps"] == 1

    async def wrong():
        return package.train("smal.toml")

    with pytest.raises(ValueError, match=r"smal\.toml: no such file"):
        asyncio.run(wrong())


def test_diff(silva, trained):
    assert "the same" in silva("diff", trained.directory, trained.directory)
    other = trained.directory / "config.toml"
    rows = json.loads(silva("diff", "small.toml", other, "--json"))
    assert "output_dir" in json.dumps(rows) and "max_turn_tokens" not in json.dumps(rows)


@pytest.mark.slow
def test_eval_of_a_run_a_folder_and_scripts(silva, trained):
    def mean(*options):
        rows = json.loads(silva("eval", "@", "small.toml", "--json", *options))
        assert [(row["environment"], row["metric"], row["n"]) for row in rows] == [
            ("parity", "success", 6), ("parity", "reward", 6),
        ]  # fmt: skip
        return rows[0]["mean"]

    after = next(row["mean"] for row in trained.summary["eval_after"] if row["metric"] == "success")
    assert mean("--weights", trained.directory) == mean(f"--weights={trained.weights}") == after
    assert mean("--policy", "expert") == 1.0
    assert 0.0 <= mean("--policy", "random") < 1.0
    table = silva("eval", "@", "small.toml", "--policy", "model")
    assert "95 % interval" in table and "parity" in table


def test_sft(silva):
    options = ("--warm_start.steps", 2, "--warm_start.episodes_per_step", 4)
    text = silva("sft", "@", "small.toml", *options)
    assert "step 2/2: loss" in text
    summary = json.loads(Path("runs/small/summary.json").read_text())
    assert 0 < summary["tokens_trained"] < summary["tokens_in_rows"] and summary["tokens_generated"] == 0
    assert {row["n"] for row in summary["eval_after"]} == {6}
    assert (Path("runs/small/weights/step_2") / "model.safetensors").is_file()


@pytest.mark.slow
def test_sft_ends_early_where_the_policy_succeeds_often_enough(silva):
    options = ("--warm_start.steps", 30, "--warm_start.episodes_per_step", 2)
    assert "step 30/30" in silva("sft", "@", "small.toml", *options, "--warm_start.stop_success", 1.0)
    text = silva("sft", "@", "small.toml", *options, "--warm_start.stop_success", 0.0, "--overwrite")
    assert "stopped after step 20 of 30: the policy succeeds often enough" in text  # the first trial


def test_chat_with_the_weights_of_a_run(trained):
    said = []
    assert chat(str(trained.directory), read=script("hello", "and now?", ""), write=said.append) == 0
    assert said[0].endswith("an empty line ends the talk") and f"{trained.directory}@step_1" in said[0]
    assert len(said) in (2, 3)  # a random model may use up the context of 128 tokens with its first answer


def test_chat_ends_where_the_context_does(trained):
    said = []
    chat(str(trained.weights), read=script("x" * 200, "more"), write=said.append)
    assert said[1:] == ["the context of 128 tokens is full"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_fit_is_one_line(unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "silva", "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "silva: standard output cannot be written: No space left on device\n"
