"""The interpreter inside the walls: runs this module, compiled outside, with SETTINGS and a socket as fd 0.

It imports nothing of Silva, and little else, to start fast: `posix` and `_ctypes` are what `os` and `ctypes`
are made of. It answers each request (its length in 4 bytes, then code, stdin and seed) with how the call
ended (1 byte), a detail (4 bytes), the length of the output (4 bytes) and the output. For each call it forks,
so that a call finds a warm interpreter and leaves nothing behind; with `keep_state` a call is forked from the
one before it. Whatever a call can do to this process, it does to itself: the walls are outside.
"""

import _ast
import _ctypes
import _signal as signal
import _struct as struct
import marshal
import posix as os
import resource
import select
import sys
import time

OK, RAISED, TIMEOUT, OUTPUT, SIGNAL, EXIT = range(6)
NAME = "<python>"  # of the code, in tracebacks
RAISED_STATUS = 200  # exit status of a call that raised
DONE, DONE_RAISED, STATUS = 1, 2, 1 << 20  # words of the holder: a status is told as STATUS plus it
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
SECCOMP_SET_MODE_FILTER, NEW_LISTENER = 1, 8
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Int(_ctypes._SimpleCData):
    _type_ = "i"


class Char(_ctypes._SimpleCData):
    _type_ = "c"


class Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = Int


LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: what this process has loaded
prctl, syscall = (Function(_ctypes.dlsym(LIBC, name)) for name in ("prctl", "syscall"))


def main() -> None:
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    sys.path.extend(settings["paths"])
    sys.argv = [""]
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control = Control()
    if settings["walls"]:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        landlock(settings["landlock"], settings["writable"])
        listener = watch_network(settings)
        control.hello(listener)
    else:
        control.hello(-1)
    for name, (soft, hard) in settings["limits"].items():
        number = getattr(resource, name)
        most = resource.getrlimit(number)[1]
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(number, (min(soft, hard), hard))
    sys.dont_write_bytecode = True
    calls = Kept(settings) if settings["keep_state"] else Calls(settings)
    while request := control.request():
        control.answer(*calls.run(*request))
        import traceback  # noqa: F401  # while nobody waits: the next calls find it and `os`


class Control:
    """The socket to the host. Only this process reads it: calls close it."""

    def __init__(self) -> None:
        self.fd = os.dup(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)

    def hello(self, listener: int) -> None:
        """Says that it is ready, and hands the descriptor over that network attempts are told to."""
        if listener < 0:
            os.write(self.fd, b"0")
            return
        import _socket

        with_fd = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))]
        sock = _socket.socket(fileno=os.dup(self.fd))
        sock.sendmsg([b"1"], with_fd)
        sock.close()
        os.close(listener)

    def request(self):
        body = read(self.fd)
        return marshal.loads(body) if body else None

    def answer(self, how: int, detail: int, output: bytes) -> None:
        write_all(self.fd, struct.pack("<BiI", how, detail, len(output)) + output)


class Calls:
    """Each call is a fork of this process, and all that it started ends with it."""

    def __init__(self, settings) -> None:
        self.seconds, self.most, self.walls = settings["seconds"], settings["output_bytes"], settings["walls"]

    def run(self, code: str, stdin: bytes, seed: int):
        output, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            play(code, stdin, seed, theirs, {"__name__": "__main__"})
        os.close(theirs)
        end = os.pidfd_open(child)
        stopped, data = collect(output, end, self.seconds, self.most)
        os.close(output)
        os.close(end)
        if stopped is not None:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        self.end_others(child)
        return (*(verdict(status) if stopped is None else (stopped, 0)), data)

    def end_others(self, group: int, keep: int = 0) -> None:
        """End all that calls have started, except `keep`."""
        if self.walls:
            end_all({1, os.getpid(), keep})
        elif group and group != os.getpgid(0):  # group 0 would be this process's own
            try:  # noqa: SIM105
                os.killpg(group, signal.SIGKILL)
            except OSError:
                pass


class Kept(Calls):
    """A chain of processes: each call is a fork of the last one that ended well, which it then replaces."""

    def __init__(self, settings) -> None:
        super().__init__(settings)
        order, self.orders = os.pipe()  # from here to the holder of the state
        self.told, tell = os.pipe()  # back
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        os.set_blocking(self.told, False)
        self.holder = os.fork()
        if self.holder == 0:
            hold(order, tell, output)

    def run(self, code: str, stdin: bytes, seed: int):
        ends = time.monotonic() + self.seconds
        while drained(self.output) or drained(self.told):
            pass  # what processes of an earlier call wrote late
        write(self.orders, marshal.dumps((code, stdin, seed)))
        child = self.word(ends)
        if child <= 0:
            os._exit(1)  # the holder is gone: the host starts another sandbox
        stopped, data = collect(self.output, self.told, ends - time.monotonic(), self.most)
        word = self.word(time.monotonic()) if stopped is None else 0
        if word in (DONE, DONE_RAISED):
            self.holder = child
            self.end_others(0, keep=child)
            return (OK if word == DONE else RAISED), 0, data
        self.end_others(child, keep=self.holder)
        if stopped is None:
            return (*verdict(word - STATUS), data)
        self.word(time.monotonic() + 1.0)  # of its parent, who goes on as the holder
        return stopped, 0, data

    def word(self, until: float) -> int:
        """A number that was told; -1 if none is in time."""
        ready, _, _ = select.select([self.told], [], [], max(0.0, until - time.monotonic()))
        data = os.read(self.told, 4) if ready else b""
        return int.from_bytes(data, "little") if len(data) == 4 else -1


def hold(order: int, tell: int, output: int) -> None:
    """Take orders; each is done by a child, which goes on from here if it ends well."""
    names = {"__name__": "__main__"}
    close_all_but(order, tell, output)

    def say(number: int) -> None:
        os.write(tell, number.to_bytes(4, "little"))

    while body := read(order):
        reap_all()  # what the code before this one started and did not wait for
        code, stdin, seed = marshal.loads(body)
        mine, childs = os.pipe()
        random = sys.modules.get("random")
        try:
            drawn = random.getstate() if random else None
        except BaseException:  # the code has put something else there
            drawn = None
        child = os.fork()
        if child:
            os.close(childs)
            if os.read(mine, 1):
                os._exit(0)
            os.close(mine)
            say(STATUS + os.waitpid(child, 0)[1])
            continue
        os.close(mine)
        say(os.getpid())
        own = os.getpid()
        if random is not None and drawn is not None:
            random.setstate(drawn)  # a fork has changed it
        raised = play(code, stdin, seed, output, names, stay=True)
        if os.getpid() != own:
            os._exit(0)  # a fork that the code made and did not end
        os.write(childs, b"!")  # the parent may go
        os.close(childs)
        say(DONE_RAISED if raised else DONE)
    os._exit(0)


def play(code: str, stdin: bytes, seed: int, output: int, names, stay: bool = False):
    """Run the code in this process, a child. Ends the process; to `stay`, says whether the code raised."""
    source = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    write_all(source, stdin)
    os.lseek(source, 0, 0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd, target in ((source, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    os.close(source)
    if not stay:
        close_all_but()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setpgid(0, 0)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    raised, status = False, 0
    try:
        seed_modules(code, seed)
        execute(code, names)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        flush()
        explain(error, code)
        raised = True
    flush()
    if not stay:
        os._exit(RAISED_STATUS if raised else status & 255)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    return raised or bool(status)


def seed_modules(code: str, seed: int) -> None:
    """Equal seeds give equal random numbers, where the code itself names what makes them."""
    for name in ("random", "numpy.random"):
        if name.partition(".")[0] in code and name not in sys.modules:
            try:
                __import__(name)
            except ImportError:  # not installed; the code will see that itself
                continue
            sys.modules[name].seed(seed)


def execute(code: str, names) -> None:
    """As an interactive interpreter does: the value of a last expression is printed."""
    tree: Any = compile(code, NAME, "exec", 0x400)  # ast.PyCF_ONLY_AST
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
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
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except Exception:
            pass


def collect(output: int, end: int, seconds: float, most: int):
    """(why it must be stopped, or None; the output) of a call that has ended when `end` can be read."""
    data, ends = bytearray(), time.monotonic() + seconds
    watched = {output, end}
    while True:
        ready, _, _ = select.select(watched, [], [], max(0.0, ends - time.monotonic()))
        if output in ready:
            part = os.read(output, 1 << 16)
            data += part
            if len(data) > most:
                return OUTPUT, bytes(data[:most])
            if not part:
                watched.discard(output)
        elif ready:
            return None, bytes(data)  # what processes of its own still write is not waited for
        elif time.monotonic() >= ends:
            return TIMEOUT, bytes(data)


def verdict(status: int):
    if status < 0:
        return SIGNAL, 0
    if os.WIFSIGNALED(status):
        return SIGNAL, os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return (OK, 0) if code == 0 else (RAISED, 0) if code == RAISED_STATUS else (EXIT, code)


def end_all(spared) -> None:
    """Kill every other process of this namespace, until there is none."""
    for _ in range(1000):
        alive = False
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in spared:
                try:
                    with open(f"/proc/{name}/stat") as file:
                        alive = alive or file.read().rpartition(")")[2].split()[0] != "Z"
                    os.kill(int(name), signal.SIGKILL)
                except (OSError, IndexError):
                    pass
        reap_all()
        if not alive:
            return


def reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def read(fd: int) -> bytes:
    """A message with its length in front; empty at the end."""
    size = read_all(fd, 4)
    return read_all(fd, int.from_bytes(size, "little")) if size else b""


def read_all(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 16))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write(fd: int, body: bytes) -> None:
    write_all(fd, len(body).to_bytes(4, "little") + body)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def drained(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def close_all_but(*kept: int) -> None:
    last = 3
    for fd in sorted(kept):
        os.closerange(last, fd)
        last = fd + 1
    os.closerange(last, 1 << 16)


def landlock(version: int, writable) -> None:
    """Files: read everything, write in `writable`; no TCP; no signals and abstract sockets to outside."""
    if version < 1:
        return
    read, every = 0b1101, (1 << 13) - 1  # execute, read a file, read a directory
    every |= (1 << 13) * (version >= 2) | (1 << 14) * (version >= 3) | (1 << 15) * (version >= 5)
    net, scope = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    rules = struct.pack("<QQQ", every, net, scope)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = syscall(444, rules, len(rules), 0)
    device = read | 0b10 | (1 << 14) * (version >= 3)
    for path, allowed in [("/", read), *((path, every) for path in writable), ("/dev", device)]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", allowed, fd)
        if syscall(445, ruleset, 1, rule, 0):
            raise OSError(_ctypes.get_errno(), f"landlock: {path}")
        os.close(fd)
    if syscall(446, ruleset, 0):
        raise OSError(_ctypes.get_errno(), "landlock")
    os.close(ruleset)


def watch_network(settings) -> int:
    """Install the filter of sockets; the descriptor of its notices, or -1 where the kernel has none."""
    for key, flags in (("notify", NEW_LISTENER), ("refuse", 0)):
        program = bytes.fromhex(settings[key])
        held = (Char * len(program)).from_buffer_copy(program)
        filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, _ctypes.addressof(held))
        listener = syscall(settings["seccomp_call"], SECCOMP_SET_MODE_FILTER, flags, filter_)
        if listener >= 0:
            return listener if flags else -1
    raise OSError(_ctypes.get_errno(), "seccomp: no filter of sockets")


if __name__ == "__main__":
    main()
