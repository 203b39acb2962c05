"""Runs code in the process of one call, a fork of inside.py, which this module is sent with.

It imports little, to start fast: `posix` is what `os` is made of.
"""

import _ast
import _signal as signal
import atexit
import builtins
import gc
import posix as os
import sys

NAME = "<python>"  # of the code, in tracebacks
RAISED_STATUS = 200  # exit status of a call that raised
seeded: set[str] = set()  # modules, by calls that share this state
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def own_main():
    """The names of a module `__main__` that is the code's own."""
    sys.modules["__main__"] = main = type(sys)("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    return main.__dict__


def play(code: str, stdin: bytes, seed: int, output: int, errors: int, names, echo: bool = True) -> int:
    """Run the code in this process, a child; the status that it is to exit with. `echo` prints the value of
    a last expression."""
    source = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    write_all(source, stdin)
    os.lseek(source, 0, 0)
    for fd, target in ((source, 0), (output, 1), (errors, 2)):
        os.dup2(fd, target)
    os.close(source)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setpgid(0, 0)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, buffered = ("w" if number else "r"), (1 if name == "stderr" else -1)
        file = open(number, mode, buffered, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    status = 0
    try:
        seed_modules(code, seed)
        execute(code, names, echo)
    except SystemExit as end:
        status = end.code & 255 if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        flush()
        explain(error, code)
        status = RAISED_STATUS
    flush()
    return status


def finish(names) -> None:
    """What Python does at the end of a program, in its order. It would go on to free all that it has, which
    takes ten times as long as a short program."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flush()
    for name in list(names):
        if name != "__builtins__":
            names[name] = None  # files that are open are written, and `__del__` runs
    gc.collect()
    flush()


def seed_modules(code: str, seed: int) -> None:
    """Equal seeds give equal random numbers, where the code itself names what makes them."""
    for name in ("random", "numpy.random"):
        if name.partition(".")[0] in code and name not in seeded:
            try:
                __import__(name)
            except ImportError:  # not installed; the code will see that itself
                continue
            sys.modules[name].seed(seed)
            seeded.add(name)


def execute(code: str, names, echo: bool) -> None:
    """With `echo` as an interactive interpreter does: the value of a last expression is printed."""
    tree: Any = compile(code, NAME, "exec", 0x400)  # ast.PyCF_ONLY_AST
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, NAME, "exec"), names)
    if last is not None:
        value = eval(compile(_ast.Expression(last.value), NAME, "eval"), names)
        if value is not None:
            print(repr(value))


def explain(error: BaseException, code: str) -> None:
    """The traceback, from the model's own code on."""
    import linecache
    import traceback

    linecache.cache[NAME] = (len(code), None, code.splitlines(True), NAME)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        print("".join(traceback.format_exception(type(error), error, trace)), end="", file=sys.stderr)
    except BaseException:  # an exception that cannot be shown
        print(type(error).__name__, file=sys.stderr)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:  # noqa: SIM105
            stream.flush()  # type: ignore[union-attr]  # whatever the code has put there
        except Exception:
            pass


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
