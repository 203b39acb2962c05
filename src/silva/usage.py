"""How the commands of `silva` are called, in words: what help shows and errors name."""

from __future__ import annotations

EXIT_CODES = (
    "Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 training gave up or taught nothing, "
    "130 interrupted."
)
COMMANDS: dict[str, tuple[str, str]] = {
    "rl": ("train with reinforcement learning", "silva rl @ configs/quickstart.toml --steps 20"),
    "orchestrator": ("train with parts in other processes", "silva orchestrator @ configs/services.toml"),
    "trainer": ("serve a trainer to an orchestrator", "silva trainer @ configs/services.toml"),
    "inference": ("serve a model (OpenAI's API)", "silva inference @ configs/quickstart.toml --port 8000"),
    "sft": ("only the supervised warm start of a configuration", "silva sft @ configs/frozen_lake_tiny.toml"),
    "eval": ("evaluate on held-out tasks", "silva eval @ configs/quickstart.toml --weights runs/quickstart"),
    "chat": ("talk to a model or to a run's weights", "silva chat runs/quickstart"),
    "envs": ("list, play or check environments", "silva envs play frozen_lake --size 5"),
    "new": ("write an environment of your own to start from, with a test", "silva new environment towns"),
    "demonstrations": (
        "write what a run's best rollouts said, to be imitated",
        "silva demonstrations runs/thoughts --min-reward 0.5",
    ),
    "attack": ("try cheating agents on a reward", "silva attack math --extract boxed"),
    "doctor": ("say what this machine has and what is missing", "silva doctor"),
    "schema": ("print the JSON Schema of configuration files", "silva schema > silva.schema.json"),
    "diff": ("compare the configurations of two runs", "silva diff runs/a runs/b"),
}
# How each command is called, and what it takes besides keys of a configuration.
USAGE = {
    "rl": """\
silva rl @ FILE.toml [--dry-run | --resume [--accept-files] | --overwrite] [--section.key VALUE ...]

  --dry-run    print the resolved configuration and the plan in numbers, then stop
  --resume     continue the run in output_dir/name from its last checkpoint; without a FILE, the
               configuration saved there is used
  --accept-files
               resume although files that the configuration points at have changed; the ledger says so
  --overwrite  replace the run in output_dir/name; the old run is removed when the new one begins""",
    "orchestrator": """\
silva orchestrator @ FILE.toml [--resume [--accept-files] | --overwrite] [--section.key VALUE ...]

  --resume     continue the run in output_dir/name from its last checkpoint
  --accept-files
               resume although files that the configuration points at have changed; the ledger says so
  --overwrite  replace the run in output_dir/name; the old run is removed when the new one begins

It holds no model: placement.trainer and placement.inference say where trainer and inference are. It can be
stopped and started again while they go on. `silva rl` starts all three.""",
    "trainer": """\
silva trainer @ FILE.toml [--unix PATH | --host HOST --port PORT] [--section.key VALUE ...]

  --unix PATH    listen at a Unix socket
  --host, --port listen there; without any of these, at placement.trainer, or at any free port of this machine

The orchestrator brings the configuration of the run; of the FILE only [placement] counts. Beyond this machine
a key is needed, in the environment variable that placement.key_variable names (SILVA_API_KEY).""",
    "inference": """\
silva inference [@ FILE.toml] [--weights PATH] [--unix PATH | --host HOST --port PORT]
                [--section.key VALUE ...]

  --weights PATH a run's folder or a model folder, in place of [model]; a run's own configuration is used
                 where no FILE is given
  --unix PATH    listen at a Unix socket
  --host, --port listen there; without any of these, at the first of placement.inference, or at any free port

Serves [model] with [engine]. Beyond this machine a key is needed, in the environment variable that
placement.key_variable names (SILVA_API_KEY).""",
    "sft": """\
silva sft @ FILE.toml [--overwrite] [--section.key VALUE ...]

  --overwrite  replace the run in output_dir/name; the old run is removed when the new one begins""",
    "eval": """\
silva eval [@ FILE.toml] [--weights PATH] [--policy WHO] [--json] [--section.key VALUE ...]

  --weights PATH  a run's folder or a model folder, in place of [model]; a run's own configuration is used
                  where no FILE is given
  --policy WHO    who plays: model (default), expert or random
  --json          print the result as JSON""",
    "chat": """\
silva chat [PATH]

  PATH  a run's folder, a model folder, a GGUF file or a hub id; without it, the packaged model""",
    "envs": """\
silva envs [--json]
silva envs play NAME [--key VALUE ...]
silva envs check NAME [--json] [--key VALUE ...]

  play    you play one episode in the terminal; /prompt shows what the packaged model would read
  check   plays it without a model and says what is wrong with it; exit code 1 if something is
  --json  print the list, or what was found, as JSON
  NAME    one of the list, or your own: file.py:Class, package.module:Class, or for a check file.py
  --key   a key of the environment, as under [[environments]] in a file""",
    "new": """\
silva new environment NAME

Writes NAME.py, a small environment that works, and test_NAME.py; neither may exist yet.""",
    "demonstrations": """\
silva demonstrations RUN [--output FILE] [--min-reward NUMBER]

  RUN           a run's folder
  --output      where the rows go, as JSON Lines (default RUN/demonstrations.jsonl)
  --min-reward  the least raw reward of a row

Of each group of training the rollout with the highest raw reward is a row: `prompt` and `answer` if it has
one turn (environment "dataset"), otherwise `messages` (environment "demonstrations").""",
    "attack": """\
silva attack REWARD [--data FILE] [--json] [--key VALUE ...]
silva attack @ FILE.toml [--data FILE] [--json]

  REWARD       a name, such as math, or your own: file.py:function or package.module:function
  @ FILE.toml  the reward of the first environment in it that has one
  --data FILE  tasks: rows with a prompt and an answer; without it, a few of Silva's own
  --json       print the result as JSON
  --key        a key of the reward

The exit code is 1 if a cheat was worth a solution.""",
    "doctor": "silva doctor [--json]\n\n  --json  print the findings as JSON",
    "schema": """\
silva schema

Editors with a TOML language server complete and check a configuration that begins with the line
  #:schema ./silva.schema.json""",
    "diff": "silva diff RUN_A RUN_B [--json]\n\n  RUN_A, RUN_B  folders of runs, or TOML files",
}
# What other tools call them.
MEANT = {"train": "rl", "grpo": "rl", "evaluate": "eval", "serve": "inference", "play": "envs play"}
POLICIES = ("model", "expert", "random")
# Options that take a value, and which.
VALUES = {
    "--weights": "a run's folder or a model folder",
    "--policy": ", ".join(POLICIES),
    "--data": "a file of rows",
    "--output": "a file",
    "--min-reward": "a number",
    "--host": "a name or an address",
    "--port": "a number",
    "--unix": "a path",
}
