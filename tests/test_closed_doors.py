"""What arrives on a wire or stands in a file is never run, and nobody listens where others could come in.

Read from the code: a rule that holds in all modules, also in those that no other test opens.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "silva"
FILES = sorted(SOURCE.rglob("*.py"))

PICKLE = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "shelve",
    "multiprocessing",
}
"""`multiprocessing` pickles what goes through its queues, pipes and pools."""
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
"""Of torch.distributed: they pickle."""
PICKLED_FILES = {"FileSystemReader", "FileSystemWriter", "read_pickle", "to_pickle"}
"""torch.distributed.checkpoint's own format has pickled metadata; that of pandas is a pickle."""
RUNS_CODE = {"sandbox/running.py", "sandbox/walls.py"}
"""Where code of a model is run, inside the walls."""
LISTENS = {"wire/listening.py"}
FREE_PORTS = {"placement/carrier.py"}
"""Binds a socket to find a free port of its node, and closes it: it never listens."""
SERVERS = {"uvicorn", "socketserver", "http.server", "aiohttp.web", "wsgiref"}


def faults(tree: ast.AST, place: str) -> Iterator[str]:
    """What a module must not do, each with its line."""
    for node in ast.walk(tree):
        for words in _fault(node, place):
            yield f"{place}:{getattr(node, 'lineno', 0)}: {words}"


def _fault(node: ast.AST, place: str) -> Iterator[str]:
    match node:
        case ast.Import(names=[ast.alias(name=name)]) | ast.ImportFrom(module=name) if name in SERVERS:
            if place not in LISTENS:
                yield f"imports {name}"
        case ast.Call(func=ast.Attribute(attr="TCPStore")) if not _given(node, "master_listen_fd"):
            yield "makes a TCPStore, which listens on all interfaces"
        case ast.Call(func=ast.Attribute(attr="rendezvous") | ast.Name(id="rendezvous")):
            yield "calls rendezvous, which makes one"
        case ast.Call(func=ast.Attribute(attr="init_process_group")) if not _given(node, "store"):
            yield "calls rendezvous by init_process_group"
        case ast.Import(names=names):
            yield from (f"imports {n.name}" for n in names if n.name.partition(".")[0] in PICKLE)
        case ast.ImportFrom(module=str(module), names=names):
            inner = {module.partition(".")[0], *(alias.name for alias in names)}
            yield from (f"imports {name}" for name in sorted(inner & (PICKLE | FORBIDDEN)))
        case ast.Attribute(attr=name) if name in FORBIDDEN or name == "multiprocessing":
            yield f"names {name}"
        case ast.Call(func=ast.Name(id="eval" | "exec" as name)) if place not in RUNS_CODE:
            yield f"calls {name}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name)):
            if name == "save" or not _says(node, "weights_only", True):
                yield f"calls torch.{name} without weights_only=True"
        case ast.Call(func=ast.Attribute(attr="bind", value=value)) if len(node.args) == 1:
            loopback = isinstance(node.args[0], ast.Tuple) and _is(node.args[0].elts[0], "127.0.0.1")
            if place not in LISTENS | FREE_PORTS and not loopback and "signature" not in ast.unparse(value):
                yield f"binds {ast.unparse(node.args[0])}"
        case ast.List(elts=words) | ast.Tuple(elts=words) if _stops_ray(" ".join(map(ast.unparse, words))):
            yield "ends every Ray of the machine"
        case ast.Call(args=[ast.Constant(value=str(line)), *_]) if _stops_ray(line):
            yield "ends every Ray of the machine"
        case ast.Call(func=ast.Attribute(attr="start_server" | "create_server" | "run_app" as name)):
            yield f"listens by {name}"
    if isinstance(node, ast.Call):
        for name in ("allow_pickle", "trust_remote_code"):
            if _given(node, name) and not _says(node, name, False):
                yield f"gives {name}"


FORBIDDEN = OBJECT_COLLECTIVES | PICKLED_FILES


def _stops_ray(line: str) -> bool:
    return re.search(r"\bray\W+stop\b", line) is not None


def _given(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword for k in call.keywords)


def _says(call: ast.Call, keyword: str, value: bool) -> bool:
    return any(k.arg == keyword and _is(k.value, value) for k in call.keywords)


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def test_no_module_pickles_evaluates_or_listens_for_itself() -> None:
    found = [
        fault
        for path in FILES
        for fault in faults(ast.parse(path.read_text()), path.relative_to(SOURCE).as_posix())
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import multiprocessing.pool",
        "from cloudpickle import dumps",
        "import torch.multiprocessing as mp; torch.multiprocessing.Queue()",
        "from torch import multiprocessing",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "dist.broadcast_object_list(found)",
        "from torch.distributed import all_gather_object",
        "from torch.distributed.checkpoint import FileSystemWriter",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=given)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "pd.read_pickle(path)",
        "eval(text)",
        "socket.bind(('0.0.0.0', 80))",
        "socket.bind(address)",
        "asyncio.start_server(answer, host)",
        "dist.TCPStore('127.0.0.1', 0, 2, True)",
        "dist.rendezvous('env://')",
        "dist.init_process_group('gloo')",
        "import uvicorn",
        "subprocess.run(['ray', 'stop', '--force'])",
        "os.system('ray stop')",
        "from http.server import HTTPServer",
    ],
)
def test_the_rule_sees(code: str) -> None:
    assert [*faults(ast.parse(code), "wire/some.py")]


@pytest.mark.parametrize(
    "code",
    [
        "import pickletools",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "model.eval()",
        "socket.bind(('127.0.0.1', 0))",
        "dist.TCPStore('127.0.0.1', 0, 2, True, master_listen_fd=found)",
        "signature.bind(self, *args)",
    ],
)
def test_the_rule_lets_pass(code: str) -> None:
    assert [*faults(ast.parse(code), "wire/some.py")] == []
