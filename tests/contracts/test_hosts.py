"""What every host does with the parts of a run. A new one adds itself to the fixture `assembly`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pytest
from tests import ray_cluster
from tests.engines import inference_server
from tests.environments.process.test_workers import COUNTING, played, texts
from tests.placement.processes import lives
from tests.trainer import trainer_server

from silva.assembly import Assembly, connected
from silva.commands.serve import Builder
from silva.config.load import load
from silva.config.schema import RunConfig
from silva.registries import REGISTRIES
from silva.types import Completion, LossSpec, OptimParams, Sample, SamplingParams

T = TypeVar("T")
ENDED = 10.0  # seconds in which a process is gone
ON_RAY = pytest.param("ray", marks=ray_cluster.NEEDS_RAY)
OUTSIDE = replace(
    REGISTRIES, placements={**REGISTRIES.placements, "outside": "tests.outside_parts:OtherPlacement"}
)


def config(folder: Path, **placement: Any) -> RunConfig:
    (folder / "counting.py").write_text(COUNTING)
    world = {"type": f"{folder}/counting.py:Counting", "mark": f"{folder}/died", "workers": 1}
    values = {
        "output_dir": str(folder),
        "name": "run",
        "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
        "environments": [world],
        "algorithm": {"type": "grpo", "kl_coef": 0.1},
        "placement": {"device": "cpu", "threads": 1, **placement},
    }
    return load([], OUTSIDE, values=values, env={}).config


@pytest.fixture(scope="module", params=["local", "services", "outside", ON_RAY])
def assembly(request: pytest.FixtureRequest) -> Iterator[Assembly]:
    placement: dict[str, Any] = {"type": request.param}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("SILVA_API_KEY", trainer_server.KEY)

        def made(**placement: Any) -> Assembly:
            parts = Assembly(config(folder, **placement))
            stack.callback(parts.close)
            return parts

        if request.param == "services":
            server = stack.enter_context(inference_server.serving(made().engine, folder / "i"))
            trainer = stack.enter_context(trainer_server.serving(Builder(config(folder), stack)))
            placement |= {"inference": [server.address], "trainer": trainer}
        if request.param == "ray":
            for name, value in stack.enter_context(ray_cluster.cluster()).items():
                environment.setenv(name, value)
            placement["address"] = os.environ["RAY_ADDRESS"]
            stack.enter_context(ray_cluster.parts_of(config(folder, **placement)))
        yield made(**placement)


def run(assembly: Assembly, work: Coroutine[Any, Any, T]) -> T:
    async def reached() -> T:
        await assembly.connect()
        return await work

    return asyncio.run(reached())


@pytest.mark.slow
def test_the_engine_answers_as_it_does_in_this_process(assembly: Assembly, tmp_path: Path) -> None:
    async def sampled(parts: Assembly) -> Completion:
        return await parts.engine.sample([1, 2, 3], SamplingParams(max_tokens=12, seed=4))

    found = run(assembly, sampled(assembly))
    here = Assembly(config(tmp_path))
    assert found == run(here, sampled(here))
    here.close()


def test_what_the_trainer_publishes_is_what_the_engine_samples_from(
    assembly: Assembly, make_samples: Callable[..., list[Sample]]
) -> None:
    async def work() -> None:
        trainer, engine = await connected(assembly.trainer()), assembly.engine
        rows = make_samples([9])
        before = (await engine.score(rows[0].tokens.tolist(), 1)).logprobs
        await trainer.forward_backward(rows, LossSpec("reinforce"))
        await trainer.optim_step(OptimParams(lr=1e-2))
        await engine.load(await trainer.publish())
        assert engine.version == trainer.version > 0
        after = (await engine.score(rows[0].tokens.tolist(), 1)).logprobs
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
        own = replace(rows[0], temperatures=np.ones(9), loss_weights=np.append(0.0, np.ones(8)))
        (known,) = (await trainer.score([own], frozenset({"logprobs"}))).logprobs or ()
        assert known[1:] == pytest.approx(after, abs=1e-5)
        await trainer.close()

    run(assembly, work())


def test_what_a_recipe_needs_beside_the_policy_is_made_only_for_it(assembly: Assembly) -> None:
    async def needs(recipe: bool) -> frozenset[str]:
        trainer = await connected(assembly.trainer(recipe=recipe))
        await trainer.close()
        return trainer.capabilities.needs

    for recipe in (False, True):
        assert ("reference_logprobs" in run(assembly, needs(recipe))) == recipe


def test_a_host_that_holds_no_model_loads_none(assembly: Assembly) -> None:
    async def work() -> None:
        await (await connected(assembly.trainer())).close()

    run(assembly, work())
    assert assembly.renderer.vocabulary
    assert ("model" in vars(assembly)) == assembly.host.holds_model


@pytest.mark.slow
def test_a_worker_plays_what_this_process_plays_also_if_it_dies(assembly: Assembly) -> None:
    (environment,) = assembly.config.environments
    apart: Any = assembly.tasksets["counting"]
    told = asyncio.run(played(apart, ["a", "die once", "b"]))
    assert texts(told) == texts(asyncio.run(played(environment.taskset(), ["a", "go on", "b"])))
    first, second, *_ = pids = [int(step.metrics["pid"]) for step in told[1:]]
    assert first != second and os.getpid() not in pids
    apart.close()
    end = time.monotonic() + ENDED
    while lives(second):
        assert time.monotonic() < end
        time.sleep(0.02)
