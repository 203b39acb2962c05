"""The help page: complete, and instant because nothing heavy is imported."""

import subprocess
import sys
from pathlib import Path

from silva.config import shape
from silva.config.help import help_text
from silva.config.schema import run_config


def page(registries):
    return help_text("silva rl", "train by RL", "silva rl @ configs/smoke.toml --steps 3", registries)


def test_top_of_the_page(registries):
    assert page(registries).startswith(
        """silva rl: train by RL

usage:   silva rl [@ file.toml ...] [--section.key value ...]
example: silva rl @ configs/smoke.toml --steps 3

Values: --section.key value, --section.key=value, --flag, --no-flag, JSON for lists and tables, null.
Order: command line > TOML files, left to right, each over its `extends` > SILVA_SECTION__KEY > defaults.

  name = "run"                            Names the run's folder: output_dir/name.
  seed = 0                                Of everything random in the run.
"""
    )


def test_every_section_and_key_is_there(registries):
    text = page(registries)
    for path, field, model in shape.fields(run_config(registries)):
        if path == ("environments",):
            assert "[[environments]] of every type" in text
        elif shape.sections(field.annotation):
            assert f"[{shape.dotted(path)}]" in text
        elif path[-1] != "type":
            assert f"  {path[-1]} = " in text, path
        else:
            assert f'type = "{shape.tag(model)}"' in text
    assert max(map(len, text.splitlines())) <= 110


def test_variants_share_what_they_share(registries):
    lines = page(registries).splitlines()
    start = lines.index('[[environments]] type = "toy"  A board.')
    assert lines[start + 1].split() == ["size", "=", "4", "Side", "of", "the", "board."]
    assert lines[start + 3] == '[[environments]] type = "grid"'
    assert sum(line.startswith("  train_size = ") for line in lines) == 1
    assert '[algorithm] type = "grpo" (default)' in lines
    start = lines.index("[warm_start.optimizer]")
    assert lines[start + 1 : start + 3] == ["  as [trainer.optimizer], but", "  lr = 0.001"]


def test_imports_nothing_heavy(tmp_path):
    code = """
import sys
from silva.config.schema import Registries
from silva.config.help import help_text
import silva.config.load, silva.config.diff, silva.config.dotenv, silva.config.saved, silva.config.schema_json
w = "config_test_worlds:"
help_text("a", "b", "c", Registries({"toy": w + "Toy"}, {"linear": w + "Linear"}, {"grpo": w + "Grpo"},
                                    {"local": w + "Local"}))
print(sorted({"torch", "transformers", "numpy", "rich", "pyarrow"} & set(sys.modules)))
"""
    source = Path(__file__).parents[2] / "src"
    env = {"PYTHONPATH": f"{source}:{Path(__file__).parent}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
