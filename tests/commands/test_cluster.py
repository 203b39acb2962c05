"""The plan of a cluster, against numbers worked out by hand; and the files of examples/cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from silva import cli
from silva.commands.cluster import describe, plan
from silva.commands.plan import PROCESS_BYTES
from silva.config.load import load
from silva.errors import CapabilityError
from silva.models import memory
from silva.models.loading import PACKAGE
from silva.placement.carrier import MODE, TOKEN, TOKEN_PATH
from silva.registries import REGISTRIES

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
WIDTH, LAYERS, ROWS = 32, 2, 262  # of the byte tokenizer
KV = 16  # one head of 16 numbers
PARAMETERS = (
    ROWS * WIDTH  # embeddings, which are the head too
    + LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KV)  # q and o; k and v
    + LAYERS * 3 * WIDTH * 4 * WIDTH  # gate, up and down
    + (2 * LAYERS + 1) * WIDTH  # norms
)


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SILVA_API_KEY", MODE, TOKEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(TOKEN_PATH, str(tmp_path / "token"))


def planned(trainer: Any = None, trainer_at: str = "", workers: int = 0, **placement: Any) -> Any:
    if trainer_at:
        placement["trainer"] = trainer_at
    values = {
        "model": {"type": "tiny", "layers": LAYERS, "width": WIDTH, "heads": 2, "kv_heads": 1, "context": 64},
        "environments": [{"type": "bandit", "workers": workers}, {"type": "frozen_lake"}],
        "rollout": {"groups_per_step": 2, "group_size": 4, "limits": {"max_episode_tokens": 50}},
        "trainer": {"micro_batch_tokens": 100, **(trainer or {})},
        "placement": {"device": "cpu", **placement},
    }
    return plan(load([], REGISTRIES, values=values, env={}).config)


def by_name(found: Any) -> dict[str, Any]:
    return {part.name: part for part in found.parts}


def test_memory_of_each_part_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    parts = by_name(planned(type="services"))
    assert PARAMETERS == 39264
    cached = 4 * 2 * LAYERS * 1 * KV * 8 * 50  # float32, keys and values, 8 rollouts of 50 tokens
    assert parts["inference"].memory == PROCESS_BYTES + 4 * PARAMETERS + cached
    layer = 14 * WIDTH + 5 * 4 * WIDTH
    learning = 4 * PARAMETERS * 4  # weights, gradients and two moments
    logits = 4 * ROWS * 3 * 100
    assert parts["trainer"].memory == PROCESS_BYTES + learning + 4 * LAYERS * layer * 100 + logits
    assert parts["orchestrator"].memory == PROCESS_BYTES


@pytest.mark.parametrize("type", ["services", "ray"])
def test_each_rank_of_a_trainer_holds_its_part(type: str) -> None:
    """Of weights, gradients and moments; copies of the model divide nothing."""
    one = by_name(planned(type=type))["trainer"].memory
    divided = {"ranks": 4, "parallel": {"dp_replicate": 2}}
    found = planned(type=type, trainer=divided)
    ranks = [part for part in found.parts if part.name.startswith("trainer")]
    assert [part.name for part in ranks] == ["trainer", "trainer1", "trainer2", "trainer3"]
    assert {part.memory for part in ranks} == {one - 4 * PARAMETERS * 4 / 2}


def test_a_gpu_does_not_hold_what_is_offloaded() -> None:
    for device, models in (("cpu", 1), ("cuda", 0)):
        ray: Any = {"type": "ray", "trainer_needs": {"GPU": 1}, "device": device}
        found = [
            by_name(planned(**ray, trainer={"ranks": 2, "parallel": {"offload": offload}}))["trainer"].memory
            for offload in (False, True)
        ]
        assert found[0] - found[1] == (1 - models) * 4 * PARAMETERS * 4 / 2


def test_the_plan_says_how_ranks_divide_the_model() -> None:
    divided = {"ranks": 8, "parallel": {"dp_replicate": 2, "pp": 2}}
    found = planned(type="services", trainer=divided)
    assert found.ranks == "8 = pp 2 x dp_replicate 2 x dp_shard 2, 1f1b"
    assert "ranks of the trainer: 8 = pp 2" in describe(found)
    without = planned(type="services", trainer={"ranks": 8, "parallel": {"dp_replicate": 2}})
    more, less = (by_name(each)["trainer"].memory for each in (found, without))
    assert more - less == 4 * PARAMETERS * 2 / 2  # a stage's weights and gradients
    with pytest.raises(CapabilityError, match="embeddings that are the head too: copies of them"):
        planned(type="services", trainer={"ranks": 4, "parallel": {"tp": 2, "pp": 2}})


@pytest.mark.parametrize("type", ["local", "services", "ray"])
def test_every_placement_says_where_its_parts_are(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    more = {} if type == "local" else {"servers": 2}
    found = planned(type=type, **more)
    names = {"local": ["all of them"]}.get(type, ["orchestrator", "trainer", "inference", "inference1"])
    assert [part.name for part in found.parts] == names
    assert bool(found.shared) == (type != "local")
    short = ["CPU: the parts need 3, and this machine has 2"] if type == "ray" else []
    assert [each for each in found.missing if not each.startswith("the package ray")] == short


def test_workers_of_environments_are_on_the_cluster() -> None:
    found = planned(type="ray", workers=2, address="head:7000", worker_needs={"CPU": 2, "memory": 1e9})
    assert found.parts[-1] == replace(found.parts[-2], name="worker1")
    assert found.parts[-2].needs == {"CPU": 2, "memory": 1e9}
    assert "worker1       a Ray actor   unknown" in describe(found)
    assert not any(
        "memory of worker" in each for each in found.missing
    )  # nobody knows what an environment takes
    (missing,) = [each for each in planned(type="ray", workers=999).missing if each.startswith("CPU")]
    assert missing.startswith("CPU: the parts need 1001")
    assert len(planned(type="services", workers=2).parts) == 3  # they are the orchestrator's own


def test_a_given_cluster_needs_its_token_and_addresses_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(type="ray", address="head:7000", trainer_needs={"CPU": 99, "memory": 1000.0})
    assert any("the cluster's token" in each for each in found.missing)
    assert any("trainer_needs.memory is 1000 " in each or "KiB" in each for each in found.missing)
    assert not any("this machine has" in each for each in found.missing)  # nobody knows what is there
    assert found.ports[0].startswith("7000/tcp")
    monkeypatch.setenv(TOKEN, "t")
    assert not any("token" in each for each in planned(type="ray", address="head:7000").missing)
    addresses = ["unix:/i.sock", "http://b:2"]
    found = planned(type="services", inference=addresses, trainer_at="http://a:1")
    assert found.missing == ["the key of trainer, inference1: the variable SILVA_API_KEY is not set"]
    assert [port.partition(",")[0] for port in found.ports] == ["http://a:1", "http://b:2"]


def test_what_does_not_fit_into_this_machine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("silva.commands.cluster.memory_limit", lambda: 2**30)
    monkeypatch.setattr(memory, "memory_limit", lambda: 2**30)
    (missing,) = planned(type="services").missing
    assert missing.startswith("memory: the parts on this machine take 1.65 GiB, and there are 1 GiB")


def silva(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(words)
    output, errors = capsys.readouterr()
    return code, output or errors


def test_it_is_a_command_with_words_and_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[model]\ntype = "tiny"\n[[environments]]\ntype = "bandit"\n')
    code, text = silva(capsys, "cluster", "plan", f"@{file}")
    assert code == 0 and "missing: nothing" in text and "all of them" in text
    code, text = silva(capsys, "cluster", "plan", f"@{file}", "--json", "--model.type=pretrained",
                       f"--model.name={tmp_path}")  # fmt: skip
    found = json.loads(text)
    assert code == 1 and found["parts"][0]["memory"] is None and "config.json" in found["missing"][0]
    code, text = silva(capsys, "cluster", "status")
    assert code == 2 and "got 'status', expected plan" in text
    code, text = silva(
        capsys, "cluster", "plan", f"@{file}", "--placement.type=ray", "--placement.adress=auto"
    )
    assert code == 2 and "placement.address" in text


@pytest.mark.parametrize("name", ["ray_nodes.sh", "torchrun_nodes.sh", "slurm.sbatch"])
def test_scripts_are_well_formed(name: str) -> None:
    done = subprocess.run(["bash", "-n", EXAMPLES / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def commands(name: str, program: str) -> list[list[str]]:
    """Command lines of a script that begin with `program`, without variables."""
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    lines = [line.partition(program)[2].split() for line in text.splitlines() if f"{program} " in line]
    return [[word.replace('"', "") for word in line] for line in lines if line]


@pytest.mark.ray
@pytest.mark.slow
def test_ray_knows_the_options_of_the_script() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'silva[ray]'")
    script = "from ray.scripts.scripts import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", script, "start", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"--[a-z-]+", shown))
    lines = commands("ray_nodes.sh", "exec ray start")
    assert len(lines) == 2
    for line in lines:
        assert {word.partition("=")[0] for word in line} <= known


def test_torchrun_knows_the_options_of_the_script() -> None:
    from torch.distributed.run import get_args_parser

    (line,) = commands("torchrun_nodes.sh", "exec torchrun")
    given = [word.replace("${RANKS:-1}", "1").replace("${MASTER_PORT:-29500}", "29500") for word in line]
    read = get_args_parser().parse_args(["--node-rank=0" if "--node-rank" in w else w for w in given])
    assert (read.nnodes, read.module, read.training_script) == ("2", True, "silva")
    assert read.training_script_args[:3] == ["trainer", "@", "torchrun.toml"]


def test_slurm_begins_a_run_that_the_configuration_allows() -> None:
    config = load(arguments("slurm.sbatch"), REGISTRIES, env={}).config
    assert config.placement.address == "head:23456" and config.name == "ray"


TOKEN_MISSING, KEY_MISSING = "the cluster's token", "the key of trainer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "missing"),
    [("ray.toml", TOKEN_MISSING), ("torchrun.toml", KEY_MISSING),
     ("slurm.sbatch", TOKEN_MISSING), ("kuberay.yaml", TOKEN_MISSING)],
)  # fmt: skip
def test_the_plan_of_an_example(name: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"needs the package {PACKAGE}")
    code, text = silva(capsys, "cluster", "plan", *arguments(name), "--json")
    found = json.loads(text)
    (told,) = [each for each in found["missing"] if not each.startswith("the package ray")]
    assert code == 1 and told.startswith(missing)
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["trainer"]["memory"] > 4 * 4 * 134_515_008  # weights, gradients and moments of SmolLM2-135M
    if missing == TOKEN_MISSING:
        needs = [part["needs"] for part in parts.values() if part["needs"]]
        assert needs == [{"CPU": 4}] * 3  # on the two nodes of 8 that Slurm and Kubernetes give
    if name == "kuberay.yaml":
        assert found["shared"] == ["/shared/runs"]


def arguments(name: str) -> list[str]:
    """Of `silva rl`, as the file has them, on this machine."""
    if name.endswith(".toml"):
        return [f"@{EXAMPLES / name}"]
    (line,) = commands(name, "silva rl")
    at = [word.replace("$head:$RAY_PORT", "head:23456") for word in line if "resume" not in word]
    return [word if "ray.toml" not in word else str(EXAMPLES / "ray.toml") for word in at]


def documented(fields: Mapping[str, Any], value: Any, where: str = "") -> list[str]:
    """What of `value` the reference of KubeRay's resources does not have, or has of another type."""
    wrong = []
    for key, given in value.items():
        expected = fields.get(key, fields.get("*"))
        if expected is None:
            wrong.append(f"{where}.{key}")
        elif isinstance(expected, list):
            wrong += [w for each in given for w in documented(expected[0], each, f"{where}.{key}")]
        elif isinstance(expected, dict):
            wrong += documented(expected, given, f"{where}.{key}")
        elif not isinstance(given, expected):
            wrong.append(f"{where}.{key}: {given!r}")
    return wrong


AMOUNTS = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
POD = {
    "metadata": {"*": object},
    "spec": {
        "containers": [{
            "name": str, "image": str, "command": list, "args": list, "env": list,
            "resources": {"limits": AMOUNTS, "requests": AMOUNTS},
            "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
        }],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str, "readOnly": bool}}],
    },
}  # fmt: skip
HEAD = {"rayStartParams": {"*": str}, "template": POD, "serviceType": str, "enableIngress": bool}
WORKERS = {
    "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int,
    "rayStartParams": {"*": str}, "template": POD,
}  # fmt: skip
RAY_CLUSTER = {
    "rayVersion": str, "headGroupSpec": HEAD, "workerGroupSpecs": [WORKERS], "authOptions": {"mode": str},
    "enableInTreeAutoscaling": bool, "suspend": bool,
}  # fmt: skip
RAY_JOB = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "namespace": str},
    "spec": {
        "entrypoint": str, "shutdownAfterJobFinishes": bool, "backoffLimit": int,
        "rayClusterSpec": RAY_CLUSTER, "activeDeadlineSeconds": int, "ttlSecondsAfterFinished": int,
        "submissionMode": str, "suspend": bool,
    },
}  # fmt: skip
"""Fields and their types in KubeRay 1.6.2, docs.ray.io/en/latest/cluster/kubernetes/references/api.html."""


def test_the_manifest_has_the_fields_that_kuberay_documents() -> None:
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    assert documented(RAY_JOB, manifest) == []
    assert documented(RAY_JOB, {"spec": {"entryPoint": "x", "backoffLimit": "1"}}) == [
        ".spec.entryPoint",
        ".spec.backoffLimit: '1'",
    ]
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_manifest_has_room_for_what_the_configuration_needs() -> None:
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    words = manifest["spec"]["entrypoint"].split()
    assert words[:4] == ["silva", "rl", "@", "/shared/ray.toml"]
    argv = [f"@{EXAMPLES / 'ray.toml'}", *words[4:]]
    config = load(argv, REGISTRIES, env={}).config
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    cores = int(container["resources"]["limits"]["cpu"])
    needs = [each["CPU"] for each in config.placement.needs().values()]
    assert max(needs) <= cores and sum(needs) <= workers["replicas"] * cores
    assert str(config.output_dir).startswith(container["volumeMounts"][0]["mountPath"])
    version = manifest["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (EXAMPLES.parents[1] / "constraints.txt").read_text()
