"""One seed: a run in its world, from the first start to the end, through all that befalls it.

    plans ──> life 1: silva rl ──> killed, interrupted, a named error ──> life 2: --resume ──> ... ──> through

Every life calls `silva.commands.train.train` or, of some configurations, `silva.commands.sft.supervise`, both
unchanged. Faults end after a few lives, and then the run must come to its end, or fail by a name that the
undisturbed run of the same configuration has too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation import loop as loops
from tests.simulation.disk import SimulatedDisk, emptied, fault
from tests.simulation.earlier import Earlier
from tests.simulation.held import in_real_time, once, without_collections
from tests.simulation.ledger_check import check, facts_of, of_update
from tests.simulation.loop import ORCHESTRATOR, PROCESS, Hang, Killed, LoopTime, SimulatedLoop
from tests.simulation.network import FATES, WOKEN, Network, Node
from tests.simulation.parts import Sampler, Trained, inference, training
from tests.simulation.scenarios import FAMILIES, QUIET, TRAINER, Blow, Plan, plans, resolved
from tests.simulation.verdict import Verdict, differences

import silva.assembly
import silva.commands.outcome
import silva.commands.sft
import silva.commands.train
import silva.engines.remote.engine
import silva.monitoring.run_log
import silva.run
from silva import ports, process
from silva.errors import CheckpointError, NoSignalError, SilvaError
from silva.orchestrator import interrupt
from silva.signals import Interrupted
from silva.types import Sample
from silva.wire.transport import Peer

MOST_LIVES = 12
BURST = 5.0
"""Virtual seconds of a life in which the network is bad. If it stayed so, it would wake up what hangs."""
Show = Callable[[str], None]


def simulate(seed: int, root: Path, show: Show = lambda line: None) -> Verdict:
    """Play a seed in the folder `root`, which is emptied."""
    rng = Random(seed)
    family = rng.randrange(FAMILIES)
    simulation = Simulation(seed, family, rng, root, show)
    with without_collections(), in_real_time():
        verdict = simulation.play()
    if not verdict.problems and simulation.repeats:
        expected = reference(family, root)
        verdict.compared = True
        if (verdict.end, verdict.facts) != (expected.end, expected.facts):
            verdict.problems += differences(verdict, expected)
    return verdict


@functools.cache
def reference(family: int, root: Path) -> Verdict:
    """The run of a configuration that nothing befalls."""
    rng = Random(f"reference {family}")
    simulation = Simulation(
        -1 - family, family, rng, root.with_name(f"{root.name}-reference"), lambda line: None
    )
    simulation.plans = []
    return simulation.play()


class Simulation:
    def __init__(self, seed: int, family: int, rng: Random, root: Path, show: Show) -> None:
        emptied(root)
        self.verdict, self.rng, self._show = Verdict(seed), rng, show
        self.runs, self.gone = root / "runs", root / "gone"
        self.run = self.runs / "run"
        self.resolved = resolved(family, self.runs)
        config = self.resolved.config
        self.level = config.rollout.max_async_level
        self.plans: Sequence[Plan] = plans(rng, 1 + len(config.placement.inference))
        self.plan, self.life, self.killed, self.power = QUIET, 0, False, False
        self.operations, self.failing, self.reached = 0, 0, Counter[str]()
        self.no_replies, self.began = 0, 0.0
        self.loop = SimulatedLoop()
        self.loop.pause = lambda: rng.uniform(0.0, 0.01)
        self.disk = SimulatedDisk(root, self._disk_step)
        self.network = Network(self.loop, rng, self._fate, lambda: self.life)
        addresses = (TRAINER, *config.placement.inference)
        names = ("trainer", *(f"inference-{i}" for i in range(len(addresses) - 1)))
        for address, name in zip(addresses, names, strict=True):
            self.network.nodes[address] = Node(self.loop, name, self._app)
        self.nodes = list(self.network.nodes.values())
        self._outside = contextvars.copy_context()
        self.earlier = Earlier(self.run, config.seed, there=seed >= 0 and rng.random() < 0.12)

    @property
    def repeats(self) -> bool:
        """The end is that of the undisturbed run, to the bit."""
        return self.level == 0 and not self.no_replies and self.verdict.end != CheckpointError.__name__

    def say(self, text: str) -> None:
        self._show(f"{self.loop.time():9.3f} {text}")

    # --- lives

    def play(self) -> Verdict:
        verdict = self.verdict
        with self._installed():
            try:
                for self.life in range(1, MOST_LIVES + 1):
                    quiet = self.life > len(self.plans)
                    end = self._live(QUIET if quiet else self.plans[self.life - 1])
                    verdict.lives.append(end)
                    self.say(f"life {self.life} ends: {end}")
                    through = end == "through"
                    verdict.problems += check(self.run, self.level, finished=through)
                    verdict.problems += self.earlier.lost()
                    if verdict.problems or through:
                        break
                    if quiet and end.split(":")[0] in self._named():
                        break
                    if quiet:
                        verdict.problems.append(f"nothing befell life {self.life}, and it ended with {end}")
                        break
                verdict.end = verdict.lives[-1].split(":")[0]
                if verdict.end == "through":
                    verdict.facts = facts_of(self.run)
            except Hang as hang:
                verdict.problems.append(f"hang in life {self.life}: {hang}")
            except Exception as error:
                said = "".join(traceback.format_exception(error))
                verdict.problems.append(
                    f"life {self.life} ended with {type(error).__name__}: {error}\n{said}"
                )
        verdict.turns, verdict.seconds = self.loop.turns, self.loop.time()
        return verdict

    def _named(self) -> set[str]:
        """Errors by which a run may fail for good: of its own, or if its checkpoints were destroyed."""
        return {NoSignalError.__name__, *([CheckpointError.__name__] if self.verdict.fired["rot"] else [])}

    def _live(self, plan: Plan) -> str:
        """One life; how it ended: "through", "killed", "Interrupted", or a named error with its words."""
        self.plan, self.killed, self.power = plan, False, False
        self.operations, self.failing, self.reached = 0, 0, Counter()
        self.began = self.loop.time()
        self.loop.moved()
        for node in self.nodes:
            node.start()
            node.go_on()
        timers = [self._outside.run(self.loop.call_later, blow.at, self._strike, blow)
                  for blow in plan.blows if isinstance(blow.at, float)]  # fmt: skip
        inside = contextvars.copy_context()
        inside.run(PROCESS.set, ORCHESTRATOR)
        try:
            flags = self.earlier.flags(self.life)
            if self.resolved.config.data:
                inside.run(silva.commands.sft.supervise, self.resolved, **flags)
            else:
                console: Any = SimpleNamespace(print=lambda text, **how: self.say(text))
                inside.run(silva.commands.train.train, self.resolved, **flags, console=console)
            return "through"
        except (SilvaError, Interrupted, KeyboardInterrupt) as error:
            if self.killed:
                return "killed"
            return f"{type(error).__name__}: {error}"
        except BaseException:
            if self.killed:
                return "killed"
            raise
        finally:
            for timer in timers:
                timer.cancel()
            if self.killed:
                self._thaw()
            for blow in plan.blows:
                if blow.kind == "rot":
                    self._rot()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In place of `asyncio.run`: the loop goes on, as the servers do."""
        task = self.loop.create_task(work)
        try:
            self.loop.run_until(task, or_if=lambda: self.killed)
        except KeyboardInterrupt:  # the second signal: everything is cancelled, as asyncio does it
            self.loop.end(ORCHESTRATOR)
            raise
        self.loop.end(ORCHESTRATOR)
        if self.killed:
            raise Killed from (None if task.cancelled() else task.exception())
        return task.result()

    def _kill(self, power: bool) -> None:
        """What the process does from now on has no effect: its folder is elsewhere, and nobody hears it."""
        self.killed, self.power = True, power
        self.verdict.fired["power" if power else "kill"] += 1
        for node in self.nodes:
            node.stop()
        if self.runs.exists():
            os.rename(self.runs, self.gone)
        self.loop.stop()

    def _thaw(self) -> None:
        shutil.rmtree(self.runs, ignore_errors=True)
        if self.gone.exists():
            os.rename(self.gone, self.runs)
        if self.power:
            for node in self.nodes:
                node.kill()
            self.disk.power_cut(self.rng)

    def _rot(self) -> None:
        """One byte of the newest checkpoint is another one."""
        checkpoints = self.run / "checkpoints"
        if not self.earlier.is_replaced():
            return
        steps = sorted(checkpoints.glob("step_*"), key=lambda path: int(path.name[5:]))
        if files := sorted(path for path in steps[-1].rglob("*") if path.is_file()) if steps else []:
            path = self.rng.choice(files)
            data = bytearray(path.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
            self.verdict.fired["rot"] += 1
            self.say(f"--- rot: {path.relative_to(checkpoints)}")

    # --- what befalls it

    def _strike(self, blow: Blow) -> None:
        if self.killed:
            return
        node = self.nodes[blow.node]
        self.say(f"--- {blow.kind} {node.name if blow.kind in ('die', 'stop', 'gone') else ''}")
        if blow.kind in ("kill", "power"):
            self._kill(blow.kind == "power")
            return
        if blow.kind == "signal":
            for number in range(blow.count):
                self.loop.call_later(number * blow.seconds, self._signal, self.life)
            return
        self.verdict.fired[blow.kind] += 1
        if blow.kind == "stop":
            node.stop()
        else:
            node.kill()
        if blow.kind != "gone":
            self.loop.call_later(blow.seconds, self._back, node, self.life)

    def _back(self, node: Node, life: int) -> None:
        if self.killed or life != self.life:
            return
        if node.up and self.rng.random() < 0.5:  # a supervisor starts it again; or somebody continues it
            node.kill()
        node.start()
        node.go_on()
        self.say(f"--- {node.name} is back")

    def _signal(self, life: int) -> None:
        """Only where the loop listens: asyncio's own way with Ctrl-C is not simulated."""
        if self.killed or life != self.life:
            return
        if signal.getsignal(signal.SIGTERM) is interrupt._heard:
            self.verdict.fired["signal"] += 1
            signal.raise_signal(signal.SIGTERM)

    def _fate(self, node: Node, path: str) -> str:
        burst = self.loop.time() < self.began + BURST
        if not burst or self.rng.random() >= self.plan.noise:
            return ""
        fate = self.rng.choice(FATES)
        if node.name == "trainer" and fate in ("twice", "busy"):  # HTTP sends no POST twice by itself
            return ""
        self.verdict.fired[fate] += 1
        self.say(f"--- {fate}: {node.name} {path.partition('?')[0][:30]}")
        return fate

    def _disk_step(self, operation: str, path: Path) -> None:
        if PROCESS.get() != ORCHESTRATOR:
            return
        if self.killed:
            raise Killed
        self.loop.moved()
        if operation == "torn":
            self._kill(self._dies_with)
            raise Killed
        self.operations += 1
        for blow in self.plan.blows:
            if blow.at == "disk" and self.operations == blow.count:
                self.say(f"--- {blow.kind} at {operation} of {path.name}")
                if blow.kind != "fault" and operation == "write" and self.rng.random() < 0.5:
                    self.disk.tears, self._dies_with = True, blow.kind == "power"
                    return
                if blow.kind != "fault":
                    self._kill(blow.kind == "power")
                    raise Killed
                self.failing, self._code = blow.length, blow.code
        if self.failing and operation != "remove":
            self.failing -= 1
            self.verdict.fired["disk"] += 1
            raise fault(self._code, path)

    def _crash_point(self, name: str) -> None:
        if self.killed:
            raise Killed
        self.reached[name] += 1
        for blow in self.plan.blows:
            if blow.at == name and self.reached[name] == blow.count:
                self.say(f"--- {blow.kind} at {name}")
                self._kill(blow.kind == "power")
                raise Killed

    # --- the parts

    def _app(self, node: Node) -> Any:
        if node.name == "trainer":
            return training(
                lambda asked: Trained(node, asked, self.rng, self._trains, self._fails), self.runs
            )
        return inference(Sampler(node, self.rng, self._lies), self.runs)

    def _lies(self) -> bool:
        lies = self.rng.random() < self.plan.lies
        self.verdict.fired["lie"] += lies
        return lies

    def _fails(self, call: str) -> bool:
        fails = self.rng.random() < self.plan.fails
        self.verdict.fired["trainer raises"] += fails
        return fails

    def _trains(self, samples: Sequence[Sample], version: int) -> None:
        """The trainer is asked for an update: does the disk know, and are the rows fresh?"""
        if WOKEN.get() or self.resolved.config.data:
            return  # of a run that has given this trainer up; nothing comes of it
        ledger = self.run / "ledger.jsonl"
        self.verdict.problems += of_update(ledger, samples, version, self.level, self.disk.is_durable(ledger))

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """The simulation in the place of loop, threads, clock, disk, network and crash points."""
        made = silva.engines.remote.engine._failed

        def failed(words: str, error: Any) -> Any:
            self.no_replies += 1
            return made(words, error)

        def told(text: str, console: Any = None) -> None:
            self.say(text)

        def connected(peer: Peer) -> Any:
            return self.network.client(peer.address)

        with contextlib.ExitStack() as stack:
            for target, name, new in (
                (asyncio, "run", self._run),
                (asyncio, "run_coroutine_threadsafe", loops.run_coroutine_threadsafe),
                (Peer, "_connected", connected),
                (process, "loaded", contextlib.nullcontext),
                (process, "forget", lambda: None),
                (ports, "_crash", "simulated"),
                (ports, "_reach", self._crash_point),
                (silva.monitoring.run_log, "version", lambda: silva.__version__),
                (silva.assembly, "load_tokenizer", once(silva.assembly.load_tokenizer, "tiny")),
                (silva.assembly, "Renderer", once(silva.assembly.Renderer, "tiny")),
                *((module, "say", told) for module in (silva.run, silva.commands.outcome)),
                (silva.run, "to_toml", once(silva.run.to_toml, id(self.resolved))),
                (silva.run, "input_files", once(silva.run.input_files, id(self.resolved))),
                (silva.engines.remote.engine, "_failed", failed),
            ):
                stack.enter_context(mock.patch.object(target, name, new))
            stack.enter_context(ports.use_files(self.disk))
            stack.enter_context(ports.use_clock(LoopTime(self.loop)))
            try:
                yield
            finally:
                self._closed()

    def _closed(self) -> None:
        self.loop.give_up()
        for node in self.nodes:
            node.kill()
        for _ in range(5):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.loop.close()
        asyncio.set_event_loop(None)
