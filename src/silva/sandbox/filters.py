"""Filters of system calls (seccomp BPF), as bytes for the kernel.

`denied`: what a program that computes does not need and what has been a way out of sandboxes: tracing,
mounts, namespaces, keys, BPF, io_uring, files without a name that can be executed, and what no resource limit
counts: shared memory, semaphores and queues of System V, queues of POSIX, larger buffers of sockets. They
fail with EPERM.

`network`: sockets, and pairs of them, of any family but AF_UNIX. With `notify` the kernel asks a supervisor
outside about each, so that no attempt goes unseen; otherwise they fail with EACCES.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

ALLOW, ERRNO, NOTIFY, KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000  # SECCOMP_RET_*
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: NS, CGROUP, UTS, IPC, USER, PID, NET
AF_UNIX = 1
SEND_BUFFER = (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes

X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "memfd_create": 319, "memfd_secret": 447, "execveat": 322,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "unshare": 272, "setns": 308,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "fanotify_init": 300,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "iopl": 172, "ioperm": 173, "modify_ldt": 154, "swapon": 167, "swapoff": 168, "reboot": 169, "acct": 163,
    "quotactl": 179, "syslog": 103, "personality": 135, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "vhangup": 153,
    "sethostname": 170, "setdomainname": 171, "migrate_pages": 256, "move_pages": 279, "vmsplice": 278,
    "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240,
}  # fmt: skip
AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "pidfd_getfd": 438,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "memfd_create": 279, "memfd_secret": 447, "execveat": 281,
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "move_mount": 429, "open_tree": 428,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "unshare": 97, "setns": 268,
    "add_key": 217, "request_key": 218, "keyctl": 219,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "fanotify_init": 262,
    "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "swapon": 224, "swapoff": 225, "reboot": 142, "acct": 89,
    "quotactl": 60, "syslog": 116, "personality": 92, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "settimeofday": 170, "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171, "vhangup": 58,
    "sethostname": 161, "setdomainname": 162, "migrate_pages": 238, "move_pages": 239, "vmsplice": 75,
    "shmget": 194, "shmat": 196, "msgget": 186, "semget": 190, "mq_open": 180,
}  # fmt: skip
# Name of the machine -> (AUDIT_ARCH, denied calls, numbers of the calls whose arguments are looked at).
NAMES = ("clone", "clone3", "socket", "socketpair", "setsockopt")
MACHINES = {
    "x86_64": (0xC000003E, X86_64, dict(zip(NAMES, (56, 435, 41, 53, 54), strict=True))),
    "aarch64": (0xC00000B7, AARCH64, dict(zip(NAMES, (220, 435, 198, 199, 208), strict=True))),
}


def known() -> bool:
    """Whether there are filters for this machine's processor."""
    return platform.machine() in MACHINES


def denied() -> bytes:
    """The filter of what nobody needs."""
    _, calls, others = MACHINES[platform.machine()]
    refused = (RETURN, 0, 0, ERRNO | errno.EPERM)
    rules = [_refuse(number, errno.EPERM) for number in calls.values()]
    # The flags of clone3 are behind a pointer that a filter cannot follow: without it, libc uses clone.
    rules.append(_refuse(others["clone3"], errno.ENOSYS))
    rules.append(_of(others["clone"], [(LOAD, 0, 0, _argument(0)), (ANY_BIT, 0, 1, NEW_NAMESPACES), refused]))
    # Whatever the level is: no protocol that Unix sockets know has options of these numbers.
    sizes = [(EQUAL, 0, 1, option) for option in SEND_BUFFER]
    option = [instruction for test in sizes for instruction in (test, refused)]
    rules.append(_of(others["setsockopt"], [(LOAD, 0, 0, _argument(2)), *option]))
    return _program(rules)


def network(notify: bool) -> bytes:
    """The filter of sockets that lead out."""
    _, _, others = MACHINES[platform.machine()]
    verdict = NOTIFY if notify else ERRNO | errno.EACCES
    family = [(LOAD, 0, 0, _argument(0)), (EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, verdict)]
    return _program([_of(others[name], family) for name in ("socket", "socketpair")])


Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, value


def _refuse(number: int, code: int) -> list[Instruction]:
    return [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | code)]


def _of(number: int, test: Sequence[Instruction]) -> list[Instruction]:
    """A test of the arguments of one call, which is allowed at its end."""
    return [(EQUAL, 0, len(test) + 1, number), *test, (RETURN, 0, 0, ALLOW)]


def _argument(index: int) -> int:
    return 16 + 8 * index  # offset of its low half in struct seccomp_data


def _program(rules: Sequence[Sequence[Instruction]]) -> bytes:
    """Rules for calls of this processor's own kind; any other kind (32 bits, x32) ends the process."""
    architecture = MACHINES[platform.machine()][0]
    head: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, KILL),
    ]
    code = [*head, *(instruction for rule in rules for instruction in rule), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
