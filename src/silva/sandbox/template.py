"""The warm interpreter that every sandbox is a fork of, compiled outside and started with a socket as fd 0.

    template, between outer walls ──fork──> a sandbox, in namespaces of its own, where inside.py answers calls

A message on the socket is the settings of a sandbox, marshalled, with the socket that this one answers on.
The template runs no code but Silva's and that of packages it is told to import, so no sandbox leaves anything
in it. Where bubblewrap does not build the outer walls, it builds them itself: a root in memory that shows the
bound folders read-only. It ends with the process at the other end of its socket, and all sandboxes with it.
"""

import _ctypes
import _signal as signal
import _sitebuiltins
import _socket as socket
import _struct as struct
import builtins
import gc
import marshal
import posix as os
import sys

from silva.sandbox.inside import LIBC, KernelCall, hand_over, prctl, serve, set_filter

NEW_ALL = 0x7E020000  # CLONE_NEW*: NS, CGROUP, UTS, IPC, USER, PID, NET
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
NOBODY = 65534
MOST = 1 << 17  # bytes of a message
CHANNEL = 3  # of a sandbox: its only descriptor but the three of the standard streams

_unshare, _mount, _umount, _pivot_root, _capset, _sethostname = (
    KernelCall(_ctypes.dlsym(LIBC, name))
    for name in ("unshare", "mount", "umount2", "pivot_root", "capset", "sethostname")
)


def main() -> None:
    told = marshal.loads(bytes.fromhex(sys.argv[1]))
    if told["binds"]:
        build_walls(told["binds"])
    sys.path.extend(told["paths"])
    sys.argv = [""]
    for name in ("exit", "quit"):  # the builtins of `site`, which is not imported
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    for name in ("traceback", *told["ready"]):
        __import__(name)
    sys.dont_write_bytecode = True
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a sandbox here
    gc.freeze()  # so that a collection in a call does not copy what sandboxes share
    while True:
        body, sent, _, _ = control.recvmsg(MOST, socket.CMSG_SPACE(4))
        if not body:
            if told["walls"]:
                os.kill(-1, signal.SIGKILL)  # all sandboxes: nothing else is between these walls
            os._exit(0)
        if not sent:  # it has no room for a descriptor; the host finds its channel closed
            continue
        (channel,) = struct.unpack("i", sent[0][2])
        try:
            child = os.fork()
        except OSError as error:
            os.write(channel, f"!{error}".encode())
            os.close(channel)
            continue
        if child == 0:
            os.dup2(channel, CHANNEL)
            os.closerange(CHANNEL + 1, 1 << 16)
            try:
                begin(marshal.loads(body))
            except BaseException as error:
                os.write(CHANNEL, f"!{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        os.close(channel)


def begin(settings) -> None:
    """Become a sandbox: the first process of its namespaces, and answer calls until the other end closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if settings["walls"]:
        new_namespaces()
        if os.fork():
            os._exit(0)
    else:
        os.setsid()
    own = os.pidfd_open(os.getpid())
    hand_over(CHANNEL, b"p", own)
    os.close(own)
    if settings["walls"]:
        mount(None, "/", None, REC | PRIVATE)
        # Read-only: a process of root may write settings of the kernel there without any capability.
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC | RDONLY)
        room = f"size={settings['size']},nr_inodes={settings['files']},mode=1777"
        mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, room)
        os.chdir("/tmp")
        drop_capabilities()
        checked("seccomp", set_filter(settings["seccomp_call"], settings["denied"]))
    serve(settings, CHANNEL)


def new_namespaces() -> None:
    """The children of this process are in them, as the user nobody."""
    user, group = os.geteuid(), os.getegid()
    checked("unshare", _unshare(NEW_ALL))
    put("/proc/self/setgroups", "deny")
    put("/proc/self/uid_map", f"{NOBODY} {user} 1")
    put("/proc/self/gid_map", f"{NOBODY} {group} 1")


def build_walls(binds) -> None:
    """Go on as a process within them; those above it wait for it, and end with it."""
    new_namespaces()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(1)
    make_root(binds)
    worker = os.fork()
    if worker:  # process 1: takes over whatever loses its parent
        while True:
            try:
                if os.wait()[0] == worker:
                    os._exit(0)
            except ChildProcessError:
                os._exit(0)
    os.setsid()
    _sethostname(b"sandbox", 7)
    drop_capabilities()


def drop_capabilities() -> None:
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    empty = struct.pack("<IIIIIIII", 0x20080522, 0, 0, 0, 0, 0, 0, 0)
    checked("capset", _capset(empty[:8], empty[8:]))
    checked("no new privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def make_root(binds) -> None:
    # Mounted over a folder that hides nothing which is needed below.
    places = ["/mnt", "/media", "/srv", "/opt", "/tmp"]
    root = next(p for p in places if is_folder(p) and not any(f"{b}/".startswith(f"{p}/") for b in binds))
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size={1 << 20},mode=755")
    for name in ("old", "proc", "dev", "tmp"):
        os.mkdir(f"{root}/{name}")
    for name in ("bin", "sbin", "lib", "lib64"):
        if is_link(f"/{name}"):
            os.symlink(f"usr/{name}", f"{root}/{name}")
    for name in ("null", "zero", "full", "random", "urandom"):
        put(f"{root}/dev/{name}", "")
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    os.symlink("/tmp", f"{root}/dev/shm")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    for path in binds:
        target = root + path
        folders = target if is_folder(path) else target.rpartition("/")[0]
        for end in [at for at, letter in enumerate(f"{folders}/") if letter == "/" and at > len(root)]:
            if not is_folder(folders[:end]):
                os.mkdir(folders[:end])
        if target != folders:
            put(target, "")
        mount(path, target, None, BIND | REC)
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | kept_flags(target))
    os.chdir(root)
    checked("pivot_root", _pivot_root(b".", b"old"))
    checked("umount", _umount(b"/old", DETACH))
    os.rmdir("/old")
    mount(None, "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir("/tmp")


def kept_flags(path: str) -> int:
    """Flags that a mount has and that a user namespace may not take away: nodev, noexec, access times."""
    flags, found = os.statvfs(path).f_flag, 0
    for shown, given in ((4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21)):
        found |= given if flags & shown else 0
    return found


def is_folder(path: str) -> bool:
    try:
        return os.stat(path).st_mode & 0o170000 == 0o040000
    except OSError:
        return False


def is_link(path: str) -> bool:
    try:
        return os.lstat(path).st_mode & 0o170000 == 0o120000
    except OSError:
        return False


def mount(source, target: str, kind, flags: int, options: str = "") -> None:
    encoded = [part.encode() if part else None for part in (source, target, kind)]
    checked(f"mount {target}", _mount(*encoded, flags, options.encode() or None))


def put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def checked(what: str, result: int) -> None:
    if result < 0:
        error = _ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
