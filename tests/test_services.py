"""A run in processes of its own ends as one in a single process, whoever of them is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.runs import Server, differences, end_state, write_config

from silva import cli
from silva.commands import supervise
from silva.config.load import load
from silva.ports import CRASH_POINTS
from silva.registries import REGISTRIES
from silva.scratch import MEMORY

import chaos_services  # isort: skip (beside runs, whose folder tests.runs has put on the path)
from supervised_run import ROLES, SERVICES, Supervised, supervised, wait_for  # isort: skip

SHORT = ("--steps=2", "--eval.every=2", "--eval.tasks=4", "--checkpoint.every=1")
LIMIT = 1200.0  # seconds for one run, on a machine with ten times as much work as it can do
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("services")
    write_config(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    """The end state of the run in one process."""
    ended = server.rl("local", *SHORT)
    assert ended.status == 0, ended.output
    return end_state(ended.path)


def argv(folder: Path, name: str, *options: str, command: str = "rl") -> list[str]:
    config = folder / "run.toml"
    return [command, f"@{config}", "--name", name, "--output_dir", str(folder), *SHORT, *options]


def events(run: Path, event: str) -> int:
    ledger = run / "ledger.jsonl"
    return ledger.read_text().count(f'"{event}"') if ledger.exists() else 0


@pytest.mark.same_bits
def test_a_run_as_services_is_the_run_in_one_process_bit_for_bit(
    folder: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="s-") as temporary:
        env = {"TMPDIR": temporary}
        (folder / "elsewhere").mkdir()  # the large disk of a cluster
        (folder / "plain").symlink_to(folder / "elsewhere")
        with supervised(argv(folder, "plain", *SERVICES), env) as process:
            assert wait_for(lambda: events(folder / "plain", "sealed"), LIMIT), process.output
            (sockets,) = Path(temporary).glob("silva-*")
            assert sockets.stat().st_mode & 0o777 == 0o700
            assert {path.name: path.stat().st_mode & 0o777 for path in sockets.iterdir()} == {
                "inference.sock": 0o600,
                "trainer.sock": 0o600,
            }
            parts = [process.pid(role) for role in ROLES]
            assert len({*parts, process.process.pid}) == 4 and None not in parts
            assert process.wait(LIMIT) == 0, process.output
            assert process.left() == []
        assert [*Path(temporary).glob("silva-*")] == []
    assert differences(folder / "plain", undisturbed) == []
    assert process.said("silva: ") is None  # nobody was lost
    log = (folder / "plain" / "services.log").read_text()
    assert "inference: inference: tiny: listening at unix:" in log and "trainer: trainer: listening at" in log


SHM = "--trainer.transfer=shm"


@contextmanager
def tidy() -> Iterator[None]:
    """Of the folders of weights that are in shared memory meanwhile nothing is left; there is one at least.

    Those of other tests end by themselves.
    """
    seen, over = set[str](), threading.Event()

    def found() -> set[str]:
        return {path.name for path in MEMORY.glob("silva-weights-*")}

    def look() -> None:
        while not over.wait(0.05):
            seen.update(found())

    before, looking = found(), threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    assert seen - before and wait_for(lambda: not found() & (seen - before), 60.0)


def killed(folder: Path, name: str, lost: str, *options: str, **crash: str) -> list[str]:
    """What the supervisor says of a run in which `lost` is killed after the first step's rollouts.

    Args:
        crash: who is killed where, and the proof of it.
    """
    slow = ["--environments.0.delay=200", "--environments.1.delay=200"]  # changes no number
    with supervised(argv(folder, name, *SERVICES, *slow, *options), crash) as process:
        if lost:  # it plays the rollouts of the second step, or evaluates
            assert wait_for(lambda: events(folder / name, "sealed"), LIMIT), process.output
            pid = process.pid(lost)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert process.wait(LIMIT) == 0, process.output
        assert process.left() == []
    return [line for _, line in process.lines if line.startswith("silva: ") or "goes on" in line]


@pytest.mark.slow
@pytest.mark.same_bits
def test_a_trainer_that_is_killed_in_an_update_changes_nothing(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    proof = folder / "trainer.proof"
    crash = {"SILVA_CRASH_TRAINER": "backward:3", "SILVA_CRASH_PROOF": str(proof)}
    with tidy():
        told, going_on = sorted(killed(folder, "trainer", "", SHM, **crash))
    assert told == "silva: trainer was killed (SIGKILL): it is started again"
    assert going_on.endswith("the run goes on from its last checkpoint")
    assert proof.read_text() == "backward"
    assert differences(folder / "trainer", undisturbed) == []


@pytest.mark.slow
@pytest.mark.same_bits
def test_inference_and_then_the_orchestrator_are_killed_and_nothing_changes(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    proof = folder / "orchestrator.proof"
    crash = {"SILVA_CRASH": "seal:2", "SILVA_CRASH_PROOF": str(proof)}
    told = [line for line in killed(folder, "both", "inference", **crash) if line.startswith("silva: ")]
    assert sorted(told) == [
        "silva: inference was killed (SIGKILL): it is started again",
        "silva: orchestrator was killed (SIGKILL): it is started again",
    ]
    assert proof.read_text() == "seal"
    assert differences(folder / "both", undisturbed) == []


@pytest.mark.slow
@pytest.mark.same_bits
def test_an_orchestrator_that_is_killed_before_the_first_step_does_not_bring_back_an_earlier_run(
    folder: Path, server: Server, undisturbed: dict[str, Any]
) -> None:
    """The earlier run has ended. If it came back, it would be resumed as finished."""
    assert server.rl("again", *SHORT, "--seed=5").status == 0
    proof = folder / "again.proof"
    crash = {"SILVA_CRASH": "issue:1", "SILVA_CRASH_PROOF": str(proof)}
    with supervised(argv(folder, "again", *SERVICES, "--overwrite"), crash) as process:
        assert process.wait(LIMIT) == 0 and process.left() == [], process.output
        assert process.said("silva: orchestrator was killed (SIGKILL): it is started again") is not None
    assert proof.read_text() == "issue"
    assert differences(folder / "again", undisturbed) == []


@pytest.mark.slow
@pytest.mark.same_bits
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_leaves_a_checkpoint_from_which_the_run_goes_on_elsewhere(
    folder: Path, server: Server, undisturbed: dict[str, Any], number: signal.Signals
) -> None:
    """As clusters send it. The checkpoint is that of the last whole step, though every second one has one."""
    name = number.name
    options = ("--checkpoint.every=2", "--environments.0.delay=1000", "--environments.1.delay=1000")
    with tidy(), supervised(argv(folder, name, *SERVICES, *options, SHM)) as process:
        assert wait_for(lambda: events(folder / name, "sealed"), LIMIT), process.output
        for pid in process.alive():
            os.kill(pid, number)
        assert process.wait(LIMIT) == 130 and process.left() == [], process.output
        assert process.said("stopped; --resume goes on after step 1") is not None, process.output
        assert process.said("silva: ") is None  # nobody was lost
    ended = server.rl(name, *SHORT, *options, "--resume")
    assert ended.status == 0 and differences(folder / name, undisturbed) == [], ended.output


@pytest.mark.slow
@pytest.mark.same_bits
def test_three_processes_started_by_hand(folder: Path, undisturbed: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="s-") as sockets, ExitStack() as stack:
        trainer, inference = f"unix:{sockets}/t.sock", f"unix:{sockets}/i.sock"
        placed = [
            *SERVICES, f"--placement.trainer={trainer}", f'--placement.inference=["{inference}"]',
            "--placement.patience=120",
        ]  # fmt: skip

        def start(command: str, *options: str, **env: str) -> Supervised:
            words = argv(folder, "by-hand", *placed, *options, command=command)
            return stack.enter_context(supervised(words, env))

        services = [start("trainer"), start("inference")]
        first = start("orchestrator", SILVA_CRASH="seal:2")
        assert first.wait(LIMIT) == -signal.SIGKILL, first.output
        assert events(folder / "by-hand", "sealed") >= 1
        second = start("orchestrator", "--resume")
        assert second.wait(LIMIT) == 0, second.output
        assert differences(folder / "by-hand", undisturbed) == []
        for service, address in zip(services, (trainer, inference), strict=True):
            assert service.process.poll() is None  # it outlives both
            assert service.said("listening at " + address) is not None
            service.process.send_signal(signal.SIGTERM)
            assert service.wait(60) == 0, service.output
            assert service.said(": stopped") is not None and service.left() == []
        assert [*Path(sockets).iterdir()] == []


Silva = Callable[..., tuple[int, str]]


@pytest.fixture
def silva(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Silva:
    """The exit code and what is written, of a command that fails soon: in this process."""
    for name in [name for name in os.environ if name.startswith("SILVA_")]:
        monkeypatch.delenv(name)

    def call(*words: str) -> tuple[int, str]:
        code, written = cli.main(words), "".join(capsys.readouterr())
        assert "Traceback" not in written
        return code, written

    return call


@pytest.mark.parametrize("placement", [[], [*SERVICES], [*SERVICES, "--placement.trainer=unix:/t.sock"]])
def test_an_orchestrator_without_addresses_is_refused(
    folder: Path, silva: Silva, placement: Sequence[str]
) -> None:
    code, output = silva(*argv(folder, "none", *placement, command="orchestrator"))
    assert code == 2 and "placement.trainer and placement.inference" in output
    assert not (folder / "none").exists()


@pytest.mark.parametrize("command", ["trainer", "inference"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_part_that_others_can_reach_needs_a_key(
    folder: Path, silva: Silva, command: str, host: str
) -> None:
    code, output = silva(*argv(folder, "none", "--host", host, command=command))
    assert code == 2 and "other machines could use this server without a key" in output
    assert "SILVA_API_KEY" in output


def test_a_trainer_needs_a_key_also_where_only_this_machine_can_reach_it(folder: Path, silva: Silva) -> None:
    code, output = silva(*argv(folder, "none", "--host", "127.0.0.1", command="trainer"))
    assert code == 2 and "everybody on this machine could use this trainer without a key" in output


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("part", ["trainer", "inference"])
def test_a_port_in_use_is_named_before_a_model_is_loaded(
    folder: Path, silva: Silva, monkeypatch: pytest.MonkeyPatch, taken: int, part: str
) -> None:
    monkeypatch.setenv("SILVA_API_KEY", "k")
    no_model = ["--model.type=pretrained", f"--model.name={folder}"]
    code, output = silva(*argv(folder, "none", "--port", str(taken), *no_model, command=part))
    assert code == 2 and f"cannot listen at http://127.0.0.1:{taken}: Address already in use" in output


def test_an_address_where_nobody_listens_is_named_when_patience_ends(folder: Path, silva: Silva) -> None:
    placed = [
        *SERVICES, "--placement.trainer=unix:/nowhere/t.sock", "--placement.patience=0.5",
        '--placement.inference=["unix:/nowhere/i.sock"]',
    ]  # fmt: skip
    code, output = silva(*argv(folder, "nobody", *placed, command="orchestrator"))
    assert code == 1 and "unix:/nowhere/i.sock" in output and "0.5 s" in output


def test_a_resumed_run_without_a_file_gives_its_services_the_configuration_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from silva.config.saved import to_toml

    run = folder / "saved"
    run.mkdir()
    words = [*argv(folder, "saved", *SERVICES)[1:]]
    (run / "config.toml").write_text(to_toml(load(words, REGISTRIES)))
    seen: list[tuple[list[str], tuple[str, ...]]] = []

    def note(resolved: Any, argv: list[str], flags: tuple[str, ...]) -> int:
        seen.append((argv, flags))
        return 0

    monkeypatch.setattr(supervise, "supervise", note)
    assert cli.main(["rl", "--resume", "--name", "saved", "--output_dir", str(folder), "--steps=3"]) == 0
    ((given, flags),) = seen
    assert flags == ("--resume",)
    expected = load([*words, "--steps=3"], REGISTRIES).config
    assert load(given, REGISTRIES).config == expected


def test_the_benchmark_hits_every_role_with_every_signal_and_at_all_of_its_crash_points() -> None:
    counts = dict.fromkeys(CRASH_POINTS, 4)
    trials = chaos_services.plan(8, 2, counts)
    assert trials == chaos_services.plan(8, 2, counts) != chaos_services.plan(8, 3, counts)
    only = [trial for trial in trials if trial.fault.role == "trainer"]
    assert only and only == chaos_services.plan(8, 2, counts, ["trainer"])
    assert chaos_services.plan(8, 2, counts, ["trial-1:", "optim:"]) == [
        trial for trial in trials if trial.name == "trial-1" or trial.fault.point.startswith("optim:")
    ]
    kinds = Counter((t.fault.role, t.fault.signal, bool(t.fault.point)) for t in trials)
    assert kinds == {
        **{(role, name, False): 8 for role in ROLES for name in ("SIGKILL", "SIGSTOP")},
        ("trainer", "SIGKILL", True): 8,
        ("orchestrator", "SIGKILL", True): 8,
        ("supervisor", "SIGKILL", False): chaos_services.SUPERVISORS,
    }
    points = {(t.fault.role, t.fault.point.partition(":")[0]) for t in trials if t.fault.point}
    assert {point for _, point in points} == {*CRASH_POINTS} and len(points) == len(CRASH_POINTS)


@pytest.mark.parametrize(
    "wrong", [{"fired": False}, {"left": ["silva trainer"]}, {"differences": ["metrics"]}]
)
def test_the_benchmark_fails_unless_all_is_right(wrong: dict[str, Any]) -> None:
    fault = chaos_services.Fault("trainer", "SIGKILL", share=0.5)
    right: dict[str, Any] = {"tries": 2, "fired": True, "seconds": 0.25}
    trials = [chaos_services.Trial("a", fault, **right), chaos_services.Trial("b", fault, **right | wrong)]
    assert chaos_services.result(trials[:1], 0)["faults"] == []
    found = chaos_services.result(trials, 0)
    (row,), (named,) = found["rows"], found["faults"]
    assert named["fault"] == "trainer SIGKILL after 50%"
    assert (row["trials"], row["tries"], row["seconds_p50"]) == (2, 4, 0.25)
    assert row["fired"] + row["right"] - row["left"] < 4


COMPUTES = """
import threading
from silva import cli, signals
from silva.commands import serve as services
from silva.server import trainer

class Updating(trainer.TrainerServer):
    def app(self):
        threading.Thread(target=threading.Event().wait).start()  # as an update computes, for minutes
        return super().app()

trainer.TrainerServer = Updating
signals.end_at_once()
cli.main()
"""


def test_a_server_in_a_shells_background_ends_on_sigterm_whatever_it_computes(folder: Path) -> None:
    """Such a shell ignores Ctrl-C for it. It ends as soon as it listens, and in order."""
    silva = [sys.executable, "-c", COMPUTES, "trainer", "@run.toml", "--unix", str(folder / "t.sock")]
    argv = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *silva]
    with subprocess.Popen(argv, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        late = threading.Timer(LIMIT / 2, server.kill)
        late.start()
        try:
            assert server.stderr is not None
            assert "listening at unix:" in next(line for line in server.stderr if "trainer: " in line)
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            assert server.stderr.read().endswith("trainer: stopped\n")
        finally:
            late.cancel()
            server.kill()
    assert not (folder / "t.sock").exists()


@pytest.mark.parametrize("gone", [True, False])
def test_a_part_whose_parent_is_gone_ends_before_it_reads_anything(gone: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "silva", "no-such-command"],
        env={**os.environ, "SILVA_PARENT": "1" if gone else str(os.getpid())}, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == (1 if gone else 2) and ("no-such-command" in done.stderr) != gone
