"""`silva import` of files that are broken, or small and stand for much: one line that says where, and no
memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from silva.cli import main
from silva.conversion.configs.carried import Computed
from silva.conversion.configs.source import read
from silva.errors import RecordError

NINES = "9" * 5000
TWICE = "X=" + "a" * 100 + "\n" + "X=$X$X\n" * 40
NAMED = "a: " + "a" * 1000 + "\nb: '" + "${a}" * 3000 + "'\n"
NINE = {i: ", ".join([f"'${{l{i - 1}}}'"] * 9) for i in range(1, 10)}
LISTS = "l0: [a]\n" + "".join(f"l{i}: [{nine}]\n" for i, nine in NINE.items())


@pytest.mark.parametrize(("name", "text", "said"), [
    ("month.yaml", "a: 1\nlr: 2026-13-45\n", "month.yaml:2: lr: no value of YAML: month"),
    ("bits.yaml", "num_generations: 0b_\n", "bits.yaml:1: num_generations: no value of YAML"),
    ("long.yaml", f"num_generations: {NINES}\n", "long.yaml:1: num_generations: no value of YAML"),
    ("long.toml", f"a = {NINES}\n", "long.toml: Exceeds the limit"),
    ("deep.toml", f"a = {'[' * 3000}{']' * 3000}\n", "deep.toml: got values nested too deeply"),
    ("own.yaml", "a: &a [*a]\n", "own.yaml: got values nested too deeply"),
    ("null.py", "\0", "null.py: no valid Python"),
    ("twice.sh", TWICE, "twice.sh: got names that stand for more than 2,000,000 characters"),
    ("named.yaml", NAMED, "named.yaml: got names that stand for more than"),
    ("lists.yaml", LISTS, "lists.yaml: got names that stand for more than"),
])  # fmt: skip
def test_says_what_is_wrong_with_a_file(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match=re.escape(said)):
        read(tmp_path / name)


@pytest.mark.parametrize("value", ['-"a"', "-[1]", f"1{'0' * 400} / 3", "2 ** 70 * 1.5", 'b"a"', "3j", "...",
                                   f"{1 << 40} * {1 << 40}"])  # fmt: skip
def test_what_python_cannot_compute_stays_an_expression(tmp_path: Path, value: str) -> None:
    (tmp_path / "mine.py").write_text(f"GRPOConfig(learning_rate={value})\n")
    found = read(tmp_path / "mine.py")["GRPOConfig.learning_rate"].value
    assert isinstance(found, Computed)


@pytest.mark.parametrize(
    "value", ["2026-13-45", "[" * 3000, f"$(({'-' * 100_000}1))", f"$((1{'0' * 400}/3))"]
)
def test_what_a_script_cannot_mean_stays_text(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.sh").write_text(f"python -m verl data.train_batch_size={value}\n")
    assert read(tmp_path / "run.sh")["data.train_batch_size"].value == value


def test_names_of_defaults_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"defaults: [{'x' * 3000}]\nb: 1\n")
    assert read(tmp_path / "a.yaml")["b"].value == 1


def test_an_output_where_there_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("num_generations: 8\nlearning_rate: 1e-6\n")
    output = tmp_path / "none" / "run.toml"
    assert main(["import", str(tmp_path / "a.yaml"), "--output", str(output)]) == 2
    assert f"silva: {output} cannot be written: No such file or directory" in capsys.readouterr().err
