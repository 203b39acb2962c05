"""The interpreter inside the walls, a fork of template.py: answers calls on a socket.

It imports nothing of Silva but running.py, which is sent with it, and little else, to start fast: `posix` and
`_ctypes` are what `os` and `ctypes` are made of. It answers each request (its length in 4 bytes, then its
fields, marshalled) with how the call ended (1 byte), a detail (4 bytes), the lengths of output and errors (4
bytes each), and both. For each call it forks, so that a call finds a warm interpreter and leaves nothing
behind; with `keep_state` a call is forked from the one before it. That a call has ended is told by the
kernel, never by the call: no descriptor of the protocol is open in it. Whatever a call can do to this
process, it does to itself: the walls are outside.
"""

import _ctypes
import _signal as signal
import _socket as socket
import _struct as struct
import gc
import marshal
import posix as os
import resource
import select
import sys
import time

from silva.sandbox.running import RAISED_STATUS, finish, own_main, play, write_all

OK, RAISED, TIMEOUT, OUTPUT, SIGNAL, EXIT = range(6)
MOST_ERRORS = 4000  # bytes of a program's standard error that are kept, the last ones
BOARD = 1 << 22  # bytes of memory shared with the holder: HEAD, then the request
HEAD = struct.Struct("<iiI")  # the copies of the holder that the call made, and the size of the request
TICK = 0.05  # seconds between two looks at what no limit of the kernel holds
MOST_SOCKETS = 1000
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SECCOMP_SET_MODE_FILTER, NEW_LISTENER = 1, 8


class Int(_ctypes._SimpleCData):
    _type_ = "i"


class Char(_ctypes._SimpleCData):
    _type_ = "c"


class KernelCall(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = Int


LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: what this process has loaded
prctl, syscall = (KernelCall(_ctypes.dlsym(LIBC, name)) for name in ("prctl", "syscall"))


def serve(settings, channel: int) -> None:
    """Answer calls until the other end of the channel is closed. Before anything is forked the host says that
    this process is in its groups."""
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = -1
    if settings["walls"]:
        landlock(settings["landlock"], settings["writable"])
        listener = watch_network(settings)
    if listener >= 0:
        hand_over(channel, b"1", listener)
        os.close(listener)
    else:
        os.write(channel, b"0")
    if read_all(channel, 1) != b"g":
        return
    of_call = settings["limits"].pop("RLIMIT_CPU")  # this process computes for all of them
    set_limits(settings["limits"])
    calls = KeptState(settings, of_call) if settings["keep_state"] else ForkedCalls(settings, of_call)
    gc.freeze()  # so that a collection in a call does not copy what calls share
    while body := read_all(channel, int.from_bytes(read_all(channel, 4), "little")):
        how, detail, output, errors = calls.run(*marshal.loads(body))
        write_all(channel, struct.pack("<BiII", how, detail, len(output), len(errors)) + output + errors)


def set_limits(limits) -> None:
    for name, (soft, hard) in limits.items():
        number = getattr(resource, name)
        most = resource.getrlimit(number)[1]
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(number, (min(soft, hard), hard))


def hand_over(channel: int, word: bytes, fd: int) -> None:
    """Send a byte to the host, and a descriptor with it."""
    sock = socket.socket(fileno=os.dup(channel))
    sock.sendmsg([word], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))])
    sock.close()


class ForkedCalls:
    """Each call is a fork of this process, and all that it started ends with it."""

    def __init__(self, settings, cpu) -> None:
        self.seconds, self.walls, self.limits = settings["seconds"], settings["walls"], {"RLIMIT_CPU": cpu}

    def run(self, code: str, stdin: bytes, seed: int, program: bool, most: int):
        output, out = os.pipe()
        errors, err = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(out, 1)
            os.dup2(err if program else out, 2)
            close_all_but()
            set_limits(self.limits)
            names = own_main()
            if program:
                names["__file__"] = "/tmp/main.py"
            status = play(code, stdin, seed, 1, 2, names, echo=not program)
            try:
                if program:
                    finish(names)
            finally:
                os._exit(status)
        os.close(out)
        os.close(err)
        found = self.outcome(child, output, errors, most)
        os.close(output)
        os.close(errors)
        self.end_others(child)
        return found

    def outcome(self, child: int, output: int, errors: int, most: int):
        """How the child ended, or was ended; with its output."""
        end = os.pidfd_open(child)
        stopped, data, said = self.collect(output, errors, end, most)
        os.close(end)
        if stopped is not None:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        return (*(stopped or verdict(status)), data, said)

    def collect(self, output: int, errors: int, end: int, most: int):
        """(Why it must be stopped, or None; output; errors) of a call that has ended if `end` can be read."""
        texts = {output: bytearray(), errors: bytearray()}
        watched = {output, errors, end}
        now = time.monotonic()
        ends, look, stopped = now + self.seconds, now + TICK, None
        while True:
            ready = select.select(watched, [], [], max(0.0, min(ends, look) - now))[0]
            for fd in texts.keys() & ready:
                part = os.read(fd, 1 << 16)
                texts[fd] += part
                if not part:
                    watched.discard(fd)
            del texts[errors][:-MOST_ERRORS]
            now = time.monotonic()
            if len(texts[output]) > most:
                stopped = OUTPUT, 0
            # What processes of its own still write is not waited for.
            ended = stopped or (end in ready and (now >= ends or len(ready) == 1))
            if not ended and now >= ends:
                ended = stopped = TIMEOUT, 0
            if ended or now >= look:
                look = now + TICK
                if self.walls and many_sockets():
                    os._exit(1)  # only the end of the whole sandbox gives the memory back
            if ended:
                break
        return stopped, bytes(texts[output][:most]), bytes(texts[errors])

    def end_others(self, group: int, keep: int = 0) -> None:
        """End all that calls have started, except `keep`."""
        if self.walls:
            end_all({1, os.getpid(), keep})
        else:
            try:  # noqa: SIM105
                os.killpg(group, signal.SIGKILL)
            except OSError:
                pass
            reap_all()


class KeptState(ForkedCalls):
    """The state is a process that is stopped, the holder. For a call it makes a copy of itself and runs the
    code. If the code ends well it makes another copy, and exits: the copy is the next holder. If not, the
    first copy is. Copies and calls are children of this process, once their parents are gone; it learns their
    numbers from memory that all share, where they may write what they like: it is their own state.
    """

    def __init__(self, settings, cpu) -> None:
        import mmap

        super().__init__(settings, cpu)
        self.board = mmap.mmap(-1, BOARD)
        self.output, output = os.pipe()
        self.nothing, closed = os.pipe()
        os.close(closed)
        os.set_blocking(self.output, False)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        self.holder = os.fork()
        if self.holder == 0:
            try:
                os.close(self.output)
                set_limits(self.limits)
                hold(self.board, output)
            finally:
                os._exit(1)
        os.close(output)

    def run(self, code: str, stdin: bytes, seed: int, program: bool, most: int):
        if program:
            raise ValueError("a program has no state that is kept")
        while drained(self.output):
            pass  # what processes of an earlier call wrote late
        child, body = self.holder, marshal.dumps((code, stdin, seed))
        self.board[: HEAD.size + len(body)] = HEAD.pack(0, 0, len(body)) + body
        os.kill(child, signal.SIGUSR1)
        os.kill(child, signal.SIGCONT)
        found = self.outcome(child, self.output, self.nothing, most)
        before, after, _ = HEAD.unpack_from(self.board)
        copies = [copy for copy in (before, after) if is_child(copy)]
        ended = found[0] in (OK, RAISED)
        if not copies:
            os._exit(1)  # the state is gone: the host starts another sandbox
        self.holder = after if ended and after in copies else copies[0]
        for copy in copies:
            os.kill(copy, signal.SIGSTOP if copy == self.holder else signal.SIGKILL)
            os.waitid(os.P_PID, copy, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # nothing runs between calls
        self.end_others(child, keep=self.holder)
        return found


def hold(board, output: int) -> None:
    """Wait for a request; what is forked here waits for the next one."""
    names = own_main()
    close_all_but(output)
    while True:
        signal.sigwait({signal.SIGUSR1})
        reap_all()  # what the code before this one started and did not wait for
        size = HEAD.unpack_from(board)[2]
        code, stdin, seed = marshal.loads(board[HEAD.size : HEAD.size + size])
        own = os.getpid()
        if not copied(board, 0):
            continue
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        status = play(code, stdin, seed, output, output, names)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        if os.getpid() != own:
            os._exit(0)  # a fork that the code made and did not end
        os.dup2(output, 1)  # fails if the code has closed what the next call needs: then this one dies
        sys.stderr = None  # a fork beside threads gets a warning
        if copied(board, 4):
            os._exit(RAISED_STATUS if status else 0)


def copied(board, place: int) -> int:
    """Fork; 0 in the child, which draws the same random numbers as this process: a fork reseeds `random`."""
    random = sys.modules.get("random")
    try:
        drawn = random.getstate() if random else None
    except BaseException:  # the code has put something else there
        drawn = None
    child = os.fork()
    if child:
        os.setpgid(child, child)
        struct.pack_into("<i", board, place, child)  # of HEAD
    elif random is not None and drawn is not None:
        random.setstate(drawn)
    return child


def is_child(process: int) -> bool:
    """Whether it is one of this process, and lives."""
    try:
        return process > 0 and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except OSError:
        return False


def many_sockets() -> bool:
    """Whether there are more than fit into memory: no limit counts sockets that wait in a queue."""
    with open("/proc/net/sockstat") as file:
        return int(file.readline().removeprefix("sockets: used ")) > MOST_SOCKETS


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


def read_all(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 16))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


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
        listener = set_filter(settings["seccomp_call"], settings[key], flags)
        if listener >= 0:
            return listener if flags else -1
    raise OSError(_ctypes.get_errno(), "seccomp: no filter of sockets")


def set_filter(call: int, program: bytes, flags: int = 0) -> int:
    """Install a filter of system calls; -1: the kernel does not take it."""
    held = (Char * len(program)).from_buffer_copy(program)
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, _ctypes.addressof(held))
    return syscall(call, SECCOMP_SET_MODE_FILTER, flags, filter_)
