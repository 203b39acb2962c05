"""The commands, each one record: to add one, add its module and an entry here."""

# fmt: off
from silva.commands.command import CONFIGURED, Command, Option

POLICIES = ("model", "expert", "random")
_JSON = Option("--json", "print the result as JSON")
_DRY_RUN = Option("--dry-run", "print the resolved configuration and the plan in numbers, then stop")
_OVERWRITE = Option(
    "--overwrite", "replace the run in output_dir/name; the old run is removed when the new one begins")
_RESUME = (
    Option("--resume", "continue the run in output_dir/name from its last checkpoint; without a file, the "
           "configuration saved there is used"),
    Option("--accept-files",
           "resume although files that the configuration points at have changed; the ledger says so"),
)
_WEIGHTS = Option("--weights", "a run (RUN, RUN@best, RUN@step_200) or a model folder, in place of [model]; "
                  "a run's own configuration is used if no file is given", "PATH",
                  "a run's folder or a model folder")
_WHO = (
    Option("--model", "a model by name: hub id, folder, run; or of the API", "NAME", "a model's name"),
    Option("--api", "a model behind an API: openai, anthropic, deepseek, together, openrouter; its key "
           "is in the environment", "NAME", "the name of an API"),
    Option("--policy", "who plays: model (default), expert or random", "WHO", ", ".join(POLICIES)),
)
_HOST = (
    Option("--host", "listen there", "HOST", "a name or an address"),
    Option("--tls-cert", "speak TLS with this certificate (PEM, with those above it)", "PATH",
           "a file"),
    Option("--tls-key", "the private key of the certificate (PEM, without a password)", "PATH", "a file"),
)
_LISTEN = (
    Option("--unix", "listen at a Unix socket", "PATH", "a path"),
    *_HOST,
    Option("--port", "listen there; without any of these, at the address in [placement], or at any free port",
           "PORT", "a number"),
)
_KEY = "Beyond this machine a key is needed, in the variable of placement.key_variable (SILVA_API_KEY)."

COMMANDS: dict[str, Command] = {
    "rl": Command(
        "train with reinforcement learning",
        "@ configs/quickstart.toml --steps 20",
        "silva.commands.configured:rl",
        (_DRY_RUN,
         Option("--probe", "with --dry-run: train for so many seconds in a scratch folder, and foretell "
                "seconds, idle shares, age of tokens and memory of a step", "SECONDS", "a number"),
         Option("--seeds", "a LoRA run of each of these seeds, at once on one base model, and one report of "
                "means and intervals", "N-N", "numbers such as 0-7 or 0,3,7"),
         *_RESUME, _OVERWRITE),
        details="Eight seeds: silva rl @ configs/quickstart.toml --model.lora.rank 16 "
                "--trainer.optimizer.lr 2e-4 --seeds 0-7",
    ),
    "orchestrator": Command(
        "train with parts in other processes",
        "@ configs/services.toml",
        "silva.commands.configured:orchestrator",
        (*_RESUME, _OVERWRITE,
         Option("--probe", "as `silva rl --dry-run --probe` starts it: measure for so many seconds",
                "SECONDS", "a number")),
        details="It holds no model: placement.trainer and placement.inference say where these are.\n"
                "It can be stopped and started again while they go on. `silva rl` starts all three.",
    ),
    "trainer": Command(
        "serve a trainer to an orchestrator",
        "@ configs/services.toml",
        "silva.commands.configured:trainer",
        _LISTEN,
        details="The orchestrator brings the configuration of the run; of the file only [placement] counts.\n"
                + _KEY,
    ),
    "inference": Command(
        "serve a model (OpenAI's API)",
        "@ configs/quickstart.toml --port 8000",
        "silva.commands.configured:inference",
        (_WEIGHTS, *_LISTEN),
        details=f"Serves [model] with [engine].\n{_KEY}",
    ),
    "serve": Command(
        "serve a model to the Tinker SDK: many LoRA runs on one base model",
        "tinker --model SmolLM2-135M-Instruct --port 8000",
        "silva.commands.serve_tinker:run",
        (Option("--model", "the base model: a hub id, folder or GGUF file (model.name)", "NAME",
                "a model's name"),
         Option("--as", "its name for clients, such as the hub id that their programs have (default: the "
                "model's)", "NAME", "a name"),
         Option("--state", "what is known and saved, so that a server goes on where another ended "
                "(default tinker)", "DIR", "a folder"),
         Option("--full", "runs in memory at once that train all weights (rank 0); 0: none (default 1)",
                "N", "a number"),
         *_HOST,
         Option("--port", "listen there (default: any free one)", "PORT", "a number"),
         Option("--database", "PostgreSQL in place of a file of --state: postgresql://USER@HOST/NAME, the "
                "password in PGPASSWORD or ~/.pgpass", "URL", "an address"),
         Option("--max-models", "models that a key may have in sessions that last", "N", "a number"),
         Option("--max-waiting", "requests of a key that may wait", "N", "a number"),
         Option("--max-bytes", "bytes that the weights of a key may take on disk", "N", "a number")),
        (f"tinker [--model NAME] [--as NAME] [--state DIR] [--full N] {CONFIGURED}",),
        details="A client needs TINKER_BASE_URL=http://127.0.0.1:PORT and TINKER_API_KEY=tml-ANY. Each key\n"
                "is a tenant. Beyond this machine, SILVA_API_KEY names those that are taken: tml-A,tml-B.",
    ),
    "cluster": Command(
        "say which part runs where, what each takes and what is missing",
        "plan @ examples/cluster/ray.toml",
        "silva.commands.cluster:run",
        (_JSON,),
        (f"plan {CONFIGURED} [--json]",),
        details="Nothing is started or loaded, and no cluster is asked. The exit code is 1 if something is\n"
                "missing.",
    ),
    "sft": Command(
        "train on dialogues of [data], or on the scripted play of [warm_start]",
        "@ configs/frozen_lake_tiny.toml",
        "silva.commands.configured:sft",
        (_DRY_RUN, *_RESUME, _OVERWRITE,
         Option("--max-bad-rows", "so many rows that cannot be read are left out and counted "
                "(data.max_bad_rows)", "N", "a number")),
    ),
    "eval": Command(
        "evaluate on held-out tasks, or on suites of the field",
        "@ configs/quickstart.toml --weights runs/quickstart",
        "silva.commands.configured:evaluate",
        (_WEIGHTS,
         Option("--weights-dir", "a series: the weights of a run, or of a folder with step_N, one row a step",
                "DIR", "a run's folder, or one with folders step_N"),
         Option("--steps", "which of the series (default all)", "N,N", "numbers such as 100,200, or all"),
         *_WHO,
         Option("--data", "where the rows of the suites are, if not on the hub", "DIR", "a file or folder"),
         Option("--tools", "what suites offer in the loop, such as python,search", "TOOLS",
                "names of tools"),
         Option("--samples", "samples of each task (eval.samples_per_task)", "K", "a number"),
         Option("--tasks", "tasks of each environment (eval.tasks)", "N", "a number"),
         Option("--name", "names the folder of the results, evals/NAME", "NAME", "a folder's name"),
         Option("--overwrite", "replace the evaluation in evals/NAME"),
         Option("--list", "list the suites"),
         Option("--shared", "compare the tasks that all evaluations have, if they differ"),
         Option("--regrade", "grade its episodes with another reward; no model is called", "EVAL",
                "an evaluation or a run"),
         Option("--reward", "that reward: a name, or file.py:function; other keys are its own", "NAME",
                "the name of a reward"),
         Option("--split", "what of a run is graded: eval, its held-out episodes (default), or train, its "
                "rollouts of training", "SPLIT", "eval or train"),
         Option("--to", "the format of an export", "FORMAT", "inspect"),
         Option("--output", "where a comparison's page or an export goes", "PATH", "a path"),
         _JSON),
        (CONFIGURED, "SUITE ... --model NAME [--data DIR] [--samples K] [--tasks N]", "--list [--json]",
         "compare A B ... [--shared] [--output FILE] [--json]",
         "export NAME --to inspect [--output DIR]",
         "--regrade EVAL --reward NAME [--key VALUE ...] [--split train] [--name NAME] [--json]"),
        {"SUITE": "one or more of the list",
         "A B ...": "evaluations of the same tasks: NAME of evals/NAME, NAME@step_200, a folder, a run"},
        "Every episode is written to evals/NAME as it ends. The same command goes on if it was interrupted,\n"
        "and plays no finished episode again.",
    ),
    "synth": Command(
        "make rows to train on from episodes of training tasks",
        "@ configs/quickstart.toml --weights runs/quickstart",
        "silva.commands.configured:synthesize",
        (_WEIGHTS,
         *_WHO,
         Option("--samples", "samples of each task (synth.samples_per_task)", "K", "a number"),
         Option("--tasks", "tasks of each environment (synth.tasks)", "N", "a number"),
         Option("--name", "names the folder of the results, synth/NAME", "NAME", "a folder's name"),
         Option("--overwrite", "replace the synthesis in synth/NAME"),
         _JSON),
        details="[synth] says which episodes become rows of synth/NAME/dialogues.jsonl, for `silva sft`.\n"
                "The same command goes on if it was interrupted; with other filters it chooses again and\n"
                "plays nothing. `silva synthesize` is the same command.",
    ),
    "chat": Command(
        "talk to a model or to a run's weights",
        "runs/quickstart",
        "silva.commands.chat:run",
        usage=("[PATH]",),
        words={"PATH": "a run (RUN, RUN@best, RUN@step_200), a model folder, GGUF file or hub id; without "
                       "it, the packaged model"},
    ),
    "view": Command(
        "look at runs in a browser: curves, forests, dialogues, tokens",
        "runs",
        "silva.commands.view:run",
        (Option("--port", "listen there, on this machine only (default: any free port)", "PORT", "a number"),
         Option("--unix", "listen at a Unix socket", "PATH", "a path"),
         Option("--export", "write a folder that opens from disk, and serve nothing", "DIR", "a new folder")),
        ("[RUN or FOLDER ...] [--port PORT | --unix PATH]", "[RUN or FOLDER ...] --export DIR"),
        {"RUN or FOLDER": "folders of runs or evaluations, or with some in them (default runs and evals)"},
        "Pages follow runs that go on. From another machine: ssh -L 8321:127.0.0.1:8321 HOST, and\n"
        "--port 8321 there.",
    ),
    "envs": Command(
        "list, play or check environments",
        "play frozen_lake --size 5",
        "silva.commands.environments:run",
        (_JSON,),
        ("[--json]", "play NAME [--key VALUE ...]", "check NAME [--json] [--key VALUE ...]"),
        {"play": "you play one episode in the terminal; /prompt shows what the packaged model would read",
         "check": "plays it without a model and says what is wrong with it; exit code 1 if something is",
         "NAME": "one of the list, or your own: file.py:Class, package.module:Class, or for a check file.py",
         "--key": "a key of the environment, as under [[environments]] in a file"},
    ),
    "new": Command(
        "write an environment of your own to start from, with a test",
        "environment towns",
        "silva.commands.new:run",
        usage=("environment NAME",),
        details="Writes NAME.py, a small environment that works, and test_NAME.py; neither may exist yet.",
    ),
    "convert": Command(
        "write a model, or rows of data, in the format of another tool",
        "runs/quickstart --to gguf --dtype q8_0",
        "silva.commands.convert:run",
        (Option("--to", "the format to write", "FORMAT",
                "hf, peft, gguf, messages, trl, sharegpt, arpo or verl"),
         Option("--output", "where it goes: a folder, or a file that ends with .gguf, .jsonl or .parquet "
                "(default: here, by the name of the source)", "PATH",
                "a path"),
         Option("--dtype", "f32, f16, bf16, and for gguf q8_0 (default: as it is stored)", "TYPE",
                "a type of numbers"),
         Option("--best", "of rollouts only the one with the highest raw reward of each group of training"),
         Option("--min-reward", "the least raw reward of a rollout", "NUMBER", "a number"),
         Option("--overwrite", "replace what is at the output"),
         Option("--push", "upload it to the Hugging Face hub too; a new repository is private", "REPO",
                "owner/name")),
        ("SOURCE --to hf|peft|gguf [--output PATH] [--dtype TYPE] [--push REPO]",
         "ROWS --to messages|trl|sharegpt|arpo|verl [--output FILE] [--push REPO]",
         "RUN --to messages|trl|sharegpt|arpo [--best] [--min-reward NUMBER] [--output FILE]"),
        {"SOURCE": "a run (RUN, RUN@best, RUN@step_N), a model folder, a hub id, a GGUF file, an adapter's "
                   "folder, or a folder with verl's model_world_size_W_rank_R.pt",
         "hf": "a Hugging Face folder, LoRA merged",
         "peft": "an adapter's folder, of a run with [model.lora]",
         "gguf": "a file for llama.cpp and Ollama, of Llama, SmolLM2, Qwen2 and Qwen3",
         "ROWS": "rows of any shape that Silva reads (a file, a folder, a data set of the hub), a run's "
                 "folder or its rollouts",
         "messages": "dialogues in OpenAI's form",
         "trl": "prompt and completion",
         "sharegpt": "conversations as LLaMA-Factory reads them",
         "arpo": "the same, with calls and results as tags in the text",
         "verl": "problems with their answers"},
    ),
    "attack": Command(
        "try cheating agents on a reward",
        "math --extract boxed",
        "silva.commands.attack:run",
        (Option("--data", "tasks: rows with a prompt and an answer; without it, a few of Silva's own",
                "FILE", "a file of rows"), _JSON),
        ("REWARD [--data FILE] [--json] [--key VALUE ...]", "@ FILE.toml [--data FILE] [--json]"),
        {"REWARD": "a name, such as math, or your own: file.py:function or package.module:function",
         "@ FILE.toml": "the reward of the first environment in it that has one",
         "--key": "a key of the reward"},
        "The exit code is 1 if a cheat was worth a solution.",
    ),
    "import": Command(
        "write another framework's configuration as Silva's",
        "grpo_script.py",
        "silva.commands.import_config:run",
        (Option("--from", "of which framework it is, where its keys do not show it", "NAME",
                "trl, verl, ragen, arpo, prime-rl, minrl or act-prm"),
         Option("--output", "write it there (default: print it)", "FILE", "a path"),
         Option("--overwrite", "replace the output"),
         _JSON),
        ("FILE ... [--from NAME] [--output FILE]",),
        {"FILE": "Python or YAML of TRL; YAML or script of verl, RAGEN and ARPO; TOML of PRIME-RL; Python of "
                 "MinRL; YAML of Act-PRM; keys of later files override those of earlier ones"},
        "Nothing in a file is run. What has no equal stands in the result as comments, line by line.",
    ),
    "monitor": Command(
        "show what a run has come to: numbers, warnings, failed episodes",
        "runs/quickstart",
        "silva.commands.monitor:run",
        (Option("--list", "list the runs in the folder (default: runs) instead, the newest first"),
         Option("--num-runs", "at most so many (default: 10)", "N", "a number"),
         Option("--metrics-only", "numbers and warnings only"),
         Option("--samples-only", "failed episodes only"),
         Option("--reward-threshold", "an episode with a lower raw reward has failed (default: 0.5)", "X",
                "a number"),
         Option("--max-samples", "at most so many failed episodes (default: 5)", "N", "a number"),
         Option("--save-dir", "write plots (SVG) to this folder", "DIR", "a folder"),
         _JSON),
        ("[RUN] [--metrics-only | --samples-only] [--save-dir DIR] [--json]",
         "--list [FOLDER] [--num-runs N] [--json]"),
        {"RUN": "a run's folder or its name in runs/ (default: the run there that changed last), "
                "wandb:ENTITY/PROJECT/RUN, or what W&B wrote offline (RUN/wandb/offline-run-...)",
         "FOLDER": "a folder of runs, or wandb:ENTITY/PROJECT"},
    ),
    "doctor": Command(
        "say what this machine has and what is missing",
        "--json",
        "silva.commands.doctor:run",
        (_JSON,),
        ("[--json]",),
    ),
    "schema": Command(
        "print the JSON Schema of configuration files",
        "> silva.schema.json",
        "silva.commands.configured:schema",
        usage=("",),
        details="Editors with a TOML language server complete and check a configuration that begins with\n"
                "  #:schema ./silva.schema.json",
    ),
    "diff": Command(
        "compare the configurations of two runs",
        "runs/a runs/b",
        "silva.commands.configured:diff",
        (_JSON,),
        ("RUN_A RUN_B [--json]",),
        {"RUN_A, RUN_B": "folders of runs, or TOML files"},
    ),
}
