"""Builds walls without bubblewrap, run from its source: `python -I -S -c SOURCE PLAN COMMAND...`.

New user, mount, process, network, IPC, host name and control group namespaces; a root of its own in memory
that shows the bound folders read-only; then the filter of system calls, no new privileges, no capabilities,
and the command as process 2 of the namespace. It imports nothing of Silva.
"""

import ctypes
import json
import os
import signal
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_ALL = 0x7E020000  # CLONE_NEW*: NS, CGROUP, UTS, IPC, USER, PID, NET
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
NOBODY = 65534


def main() -> None:
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    parent = os.getppid()
    if plan["gate"]:  # of cgroups.py
        tell, wait = plan["gate"]
        os.write(tell, b'{"child-pid": %d}' % os.getpid())
        os.read(wait, 1)
        os.close(tell)
        os.close(wait)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    user, group = os.geteuid(), os.getegid()
    checked("unshare", LIBC.unshare(NEW_ALL))
    put("/proc/self/setgroups", "deny")
    put("/proc/self/uid_map", f"{NOBODY} {user} 1")
    put("/proc/self/gid_map", f"{NOBODY} {group} 1")
    first = os.fork()
    if first:  # outside the process namespace: when this one dies, so does everything in it
        os.waitpid(first, 0)
        os._exit(1)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    make_root(plan["binds"], plan["size"], plan["files"])
    worker = os.fork()
    if worker:  # process 1: takes over whatever loses its parent
        while True:
            try:
                if os.wait()[0] == worker:
                    os._exit(0)
            except ChildProcessError:
                os._exit(0)
    os.setsid()
    LIBC.sethostname(b"sandbox", 7)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    empty = struct.pack("<IIIIIIII", 0x20080522, 0, 0, 0, 0, 0, 0, 0)
    checked("capset", LIBC.capset(empty[:8], empty[8:]))
    checked("no new privileges", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    program = ctypes.create_string_buffer(bytes.fromhex(plan["denied"]))
    rules = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(program))
    checked("seccomp", LIBC.syscall(plan["seccomp_call"], 1, 0, ctypes.create_string_buffer(rules)))
    os.chdir("/tmp")
    os.execve(command[0], command, plan["environment"])


def make_root(binds, size: int, files: int) -> None:
    # Mounted over a folder that hides nothing which is needed below.
    places = ["/mnt", "/media", "/srv", "/opt", "/tmp"]
    root = next(p for p in places if os.path.isdir(p) and not any(f"{b}/".startswith(f"{p}/") for b in binds))
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size={1 << 20},mode=755")
    for name in ("old", "proc", "dev", "tmp"):
        os.mkdir(f"{root}/{name}")
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(f"usr/{name}", f"{root}/{name}")
    for name in ("null", "zero", "full", "random", "urandom"):
        put(f"{root}/dev/{name}", "")
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    os.symlink("/tmp", f"{root}/dev/shm")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    # A process of root may write settings of the kernel there without any capability.
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | RDONLY)
    mount("tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes={files},mode=1777")
    for path in binds:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            put(target, "")
        mount(path, target, None, BIND | REC)
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | kept_flags(target))
    os.chdir(root)
    checked("pivot_root", LIBC.pivot_root(b".", b"old"))
    checked("umount", LIBC.umount2(b"/old", DETACH))
    os.rmdir("/old")
    mount(None, "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir("/tmp")


def kept_flags(path: str) -> int:
    """Flags that a mount has and that a user namespace may not take away: nodev, noexec, access times."""
    flags, found = os.statvfs(path).f_flag, 0
    for shown, given in ((4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21)):
        found |= given if flags & shown else 0
    return found


def mount(source, target: str, kind, flags: int, options: str = "") -> None:
    encoded = [part.encode() if part else None for part in (source, target, kind)]
    checked(f"mount {target}", LIBC.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None))


def put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def checked(what: str, result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
