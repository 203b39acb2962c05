"""What hostile code tries. Each attack prints WON once it has what it wants; HOST says what there is to have.

HOST: `pid` and `victim` (a process of the same user), `group` of the tests, `secret` (a file that holds
SECRET), `port` (of a listening server), `unix` and `abstract` (names of listening sockets), `home` (with the
file `private` in it), `mark` and `shared` (a file and a name of one that are not there yet).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

SYSCALL = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": 0, "aarch64": 1}
def call(x86, arm, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall((x86, arm)[numbers[platform.machine()]], *arguments)
    return result, ctypes.get_errno()
def won(result, code):
    refused = result < 0 and code in (errno.EPERM, errno.ENOSYS, errno.EACCES)
    print(errno.errorcode[code] if refused else "WON")
"""


class Attack(NamedTuple):
    """`down`: limits that let it win without walls, `up`: with them. `network`: an attempt is counted.
    `together`: only control groups can stop it, because each of its processes keeps its own limits."""

    code: str
    down: Mapping[str, object] = MappingProxyType({})
    up: Mapping[str, object] = MappingProxyType({})
    network: bool = False
    together: bool = False


def system(*lines: str) -> Attack:
    return Attack(SYSCALL + "\n".join(lines))


def sees(path: str) -> Attack:
    return Attack(f"print('WON' if open({path}, 'rb').read(1) else 'empty')")


def writes(path: str) -> Attack:
    return Attack(f"open({path}, 'ab').close(); print('WON')")


def makes(path: str) -> Attack:
    return Attack(f"import os\nopen({path!r}, 'w').close()\nos.unlink({path!r})\nprint('WON')")


def connects(family: str, address: str, kind: str = "SOCK_STREAM", network: bool = True) -> Attack:
    code = f"""
import socket
with socket.socket(socket.{family}, socket.{kind}) as s:
    s.settimeout(2)
    s.connect({address})
    {"s.send(b'x')" if kind == "SOCK_DGRAM" else "pass"}
print("WON")
"""
    return Attack(code, network=network)


READING = {
    "the secret file": Attack("print('WON' if 'SECRET' in open(HOST['secret']).read() else '')"),
    "the secret by a relative path": Attack(
        "print('WON' if open('../../../../..' + HOST['secret']).read() else '')"
    ),
    "the secret through a symbolic link": Attack(
        "import os, uuid\nlink = '/tmp/' + uuid.uuid4().hex\nos.symlink(HOST['secret'], link)\n"
        "try:\n    print('WON' if open(link).read() else '')\nfinally:\n    os.unlink(link)"
    ),
    "the secret through a hard link": Attack(
        "import os\nlink = HOST['secret'] + '.link'\nos.link(HOST['secret'], link)\n"
        "print('WON' if open(link).read() else '')\nos.unlink(link)"
    ),
    "the secret through the root of another process": sees("f\"/proc/{HOST['pid']}/root{HOST['secret']}\""),
    "the secret through the first process": sees("'/proc/1/root' + HOST['secret']"),
    "the secret by a subprocess": Attack(
        "import subprocess\ndone = subprocess.run(['cat', HOST['secret']], capture_output=True)\n"
        "print('WON' if done.stdout else '')"
    ),
    "the environment of the tests' process": Attack(
        "print('WON' if b'SILVA_SECRET' in open(f\"/proc/{HOST['pid']}/environ\", 'rb').read() else '')"
    ),
    "the command line of another process": sees("f\"/proc/{HOST['victim']}/cmdline\""),
    "the memory map of another process": sees("f\"/proc/{HOST['victim']}/maps\""),
    "the descriptors of another process": Attack(
        "import os\nprint('WON' if os.listdir(f\"/proc/{HOST['victim']}/fd\") else '')"
    ),
    "the working folder of another process": Attack(
        "import os\nprint('WON' if os.readlink(f\"/proc/{HOST['pid']}/cwd\") else '')"
    ),
    "the list of processes": Attack(
        "import os\nprint('WON' if str(HOST['victim']) in os.listdir('/proc') else '')"
    ),
    "the home folder": Attack(
        "import os\nprint('WON' if HOST['private'] in os.listdir(HOST['home']) else '')"
    ),
    "the users of the machine": sees("'/etc/passwd'"),
    "the name of the machine": Attack(
        "import os\nprint('WON' if os.uname().nodename == HOST['name'] else '')"
    ),
    "the control groups": Attack("import os\nprint('WON' if os.listdir('/sys/fs/cgroup') else '')"),
    "the devices": Attack("import os\nprint('WON' if len(os.listdir('/dev')) > 9 else '')"),
    "the network interfaces": Attack("print('WON' if len(open('/proc/net/dev').readlines()) > 3 else '')"),
}
WRITING = {
    "beside the secret": Attack("open(HOST['mark'], 'w').write('x'); print('WON')"),
    "in a shared /tmp": Attack("open('/tmp/' + HOST['shared'], 'w').write('x')\nprint('MARKED')"),
    "in shared memory": Attack("open('/dev/shm/' + HOST['shared'], 'w').write('x')\nprint('MARKED')"),
    "into a program": writes("'/usr/bin/env'"),
    "into the standard library": writes("__import__('os').__file__"),
    "into an installed package": writes("__import__('numpy').__file__"),
    "in /usr": makes("/usr/silva-mark"),
    "in the root": makes("/silva-mark"),
    "settings of the kernel": Attack("open('/proc/sys/kernel/core_pattern', 'r+').close(); print('WON')"),
    "the kernel's alarm trigger": Attack("open('/proc/sysrq-trigger', 'ab').close(); print('WON')"),
    "a device": Attack("import os, stat\npath = '/tmp/' + HOST['shared'] + '.node'\n"
                       "os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))\n"
                       "os.unlink(path); print('WON')"),
}  # fmt: skip
URL = """
from urllib.request import urlopen
import urllib.error
try:
    urlopen(f"http://127.0.0.1:{HOST['port']}/", timeout=1)
except urllib.error.URLError as error:
    print("no" if "ermission" in str(error) else "WON")
except Exception:
    print("WON")
"""
LISTEN = "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('WON')"


def opens(family: str, kind: str = "SOCK_RAW", protocol: int = 0) -> Attack:
    code = f"import socket\nsocket.socket(socket.{family}, socket.{kind}, {protocol}); print('WON')"
    return Attack(code, network=True)


NETWORK = {
    "TCP to the host": connects("AF_INET", "('127.0.0.1', HOST['port'])"),
    "UDP to the host": connects("AF_INET", "('127.0.0.1', HOST['port'])", "SOCK_DGRAM"),
    "a listening socket": Attack(LISTEN, network=True),
    "HTTP": Attack(URL, network=True),
    "IPv6": opens("AF_INET6", "SOCK_STREAM"),
    "a netlink socket": opens("AF_NETLINK"),
    "a raw socket": opens("AF_INET", protocol=1),
    "packets": opens("AF_PACKET"),
    "a pair of sockets": Attack(
        "import socket\nsocket.socketpair(socket.AF_INET); print('WON')", network=True
    ),
    "a socket by a system call": Attack(SYSCALL + "won(*call(41, 198, 2, 1, 0))", network=True),
    "a Unix socket of the host": connects("AF_UNIX", "HOST['unix']", network=False),
    "an abstract socket of the host": connects("AF_UNIX", "'\\0' + HOST['abstract']", network=False),
}
PROCESSES = {
    "a signal to another process": Attack("import os\nos.kill(HOST['victim'], 0); print('WON')"),
    "killing another process": Attack("import os\nos.kill(HOST['victim'], 9); print('WON')"),
    "killing the tests": Attack("import os\nos.kill(HOST['pid'], 0); print('WON')"),
    "a signal to the tests' group": Attack("import os\nos.killpg(HOST['group'], 0); print('WON')"),
    "tracing another process": system(
        "result, code = call(101, 117, 16, HOST['victim'], 0, 0)", "call(101, 117, 17, HOST['victim'], 0, 0)",
        "print('WON' if result == 0 else errno.errorcode[code])"),
    "reading the memory of another process": Attack(
        "import re\nline = open(f\"/proc/{HOST['victim']}/maps\").readline()\n"
        "start = int(line.split('-')[0], 16)\nfile = open(f\"/proc/{HOST['victim']}/mem\", 'rb')\n"
        "file.seek(start); print('WON' if file.read(4) else '')"),
    "the priority of another process": Attack(
        "import os\nos.setpriority(os.PRIO_PROCESS, HOST['victim'], 10); print('WON')"),
    "a descriptor of another process": system(
        "pid, code = call(434, 434, HOST['victim'], 0)", "won(*call(438, 438, pid, 0, 0))" ),
}  # fmt: skip
KERNEL = {
    "being traced": system("won(*call(101, 117, 0, 0, 0, 0))"),
    "process_vm_readv": system("won(*call(310, 270, HOST['pid'], 0, 0, 0, 0, 0))"),
    "io_uring": system("import ctypes", "won(*call(425, 425, 8, ctypes.create_string_buffer(120)))"),
    "memfd_create": system("won(*call(319, 279, b'x', 0))"),
    "keys of the kernel": system("won(*call(250, 219, 0, -3, 1))"),
    "a new user namespace": system("won(*call(272, 97, 0x10000000))"),
    "a new user namespace by clone": system(
        "import os, platform", "if platform.machine() != 'x86_64': raise SystemExit('x86-64 only')",
        "result, code = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
        "os._exit(0) if result == 0 else won(result, code)"),
    "a new user namespace by a program": Attack(
        "import subprocess\ndone = subprocess.run(['unshare', '-U', 'true'])\n"
        "print('WON' if done.returncode == 0 else '')"),
    "clone3": system("won(*call(435, 435, 0, 0))"),
    "personality": system("won(*call(135, 92, 0x0040000))"),
    "kcmp": system("import os", "won(*call(312, 272, os.getpid(), os.getpid(), 0, 0, 0))"),
    "handles of files": system("won(*call(303, 264, -100, b'/', ctypes.create_string_buffer(8), 0, 0))"),
    "moving pages": system("won(*call(279, 239, 0, 0, 0, 0, 0, 0))"),
    "a mount": system("won(*call(165, 40, b'none', b'/proc', b'nothing', 0, 0))"),
    "a new root": system("won(*call(161, 51, b'/proc'))"),
    "shared memory of System V": system(
        "number, code = call(29, 194, 0, 4096, 0o600)", "call(31, 195, number, 0, 0)", "won(number, code)"),
    "a queue of System V": system(
        "number, code = call(68, 186, 0, 0o600)", "call(71, 187, number, 0, 0)", "won(number, code)"),
    "semaphores of System V": system(
        "number, code = call(64, 190, 0, 32, 0o600)", "call(66, 191, number, 0, 0)", "won(number, code)"),
    "larger buffers of a socket": Attack(
        "import socket\nfor s in socket.socketpair():\n"
        "    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)\nprint('WON')"),
    "BPF": system("won(*call(321, 280, 5, 0, 0))"),
    "performance counters": system("won(*call(298, 241, 0, 0, -1, -1, 0))"),
    "userfaultfd": system("won(*call(323, 282, 0))"),
    "fanotify": system("won(*call(300, 262, 0, 0))"),
    "the log of the kernel": system("won(*call(103, 116, 10, 0, 0))"),
    "a module of the kernel": system("won(*call(313, 273, -1, b'', 0))"),
    "privileges by programs": Attack(
        "print('WON' if 'NoNewPrivs:\\t0' in open('/proc/self/status').read() else '')"),
    "capabilities": Attack("status = open('/proc/self/status').read()\n"
                           "print('WON' if int(status.split('CapEff:')[1].split()[0], 16) else '')"),
    "no filter of system calls": Attack(
        "print('WON' if 'Seccomp:\\t0' in open('/proc/self/status').read() else '')"),
    "being root": Attack("import os\nprint('WON' if os.getuid() == HOST['uid'] else '')"),
}  # fmt: skip
MANY = {"processes": 400, "memory_mb": 4096}
FORKS = """
import os, time
for _ in range(120):
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
print("WON")
"""
THREADS = """
import threading, time
for _ in range(120):
    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
print("WON")
"""
CHILDREN = """
import os, time
r, w = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        os.write(w, b"x")
        time.sleep(9)
        os._exit(0)
os.close(w)
got = b"".join(os.read(r, 1) for _ in range(4))
# One that was killed for memory after it had written is no win: all four hold theirs at once.
print("WON" if len(got) == 4 and os.waitpid(-1, os.WNOHANG) == (0, 0) else "")
"""
FILES = """
import os
for i in range(6):
    with open(f"/tmp/{HOST['shared']}.{i}", "wb") as f:
        f.write(bytes(4 << 20))
for i in range(6):
    os.unlink(f"/tmp/{HOST['shared']}.{i}")
print("WON")
"""
SMALL_FILES = """
import os
folder = f"/tmp/{HOST['shared']}.many/"
os.mkdir(folder)
for i in range(3000):
    open(folder + str(i), "w").close()
print("WON")
"""
WAITING = """
import os, socket, time
path = f"/tmp/{HOST['shared']}.listening"
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(path)
    listening.listen(1 << 16)
    for i in range(1500):
        with socket.socket(socket.AF_UNIX) as s:
            s.setblocking(False)
            s.connect(path)
            s.send(b"x")
    os.unlink(path)
    time.sleep(1.0)  # what is gone at once does no harm
    print("WON")
"""
LOOP = """
import time
end = time.time() + 1.0
while time.time() < end:
    pass
print("WON")
"""
STUBBORN = """
import signal, time
for number in (2, 15, 24, 14):
    signal.signal(number, signal.SIG_IGN)
end = time.time() + 1.0
while time.time() < end:
    try:
        time.sleep(0.01)
    except BaseException:
        pass
print("WON")
"""
BIG = "with open('/tmp/' + HOST['shared'] + '.big', 'wb') as f:\n    f.write(bytes(20 << 20))\nprint('WON')"
OUTPUT = "for _ in range(3000):\n    print('x' * 99)\nprint('WON')"
COMPUTE = "import time\nwhile time.process_time() < 1.6: pass\nprint('WON')"
SLOW: dict[str, object] = {"seconds": 10.0}
FAST: dict[str, object] = {"seconds": 0.4}
LIMITS = {
    "a fork bomb": Attack(FORKS, down=MANY, up={"processes": 20}),
    "a bomb of threads": Attack(THREADS, down=MANY, up={"processes": 20}),
    "memory": Attack("x = bytearray(200 << 20); print('WON')", up={"memory_mb": 100}),
    "memory of many processes": Attack(CHILDREN, up={"memory_mb": 128, "seconds": 2.0}, together=True),
    "a large file": Attack(BIG, down={"file_mb": 64}, up={"file_mb": 8}),
    "many files": Attack(FILES, down={"file_mb": 64}, up={"file_mb": 8}),
    "many small files": Attack(SMALL_FILES, up={"file_mb": 8}),
    "sockets that wait in a queue": Attack(WAITING),
    "endless output": Attack(OUTPUT, down={"output_chars": 500_000}, up={"output_chars": 5000}),
    "an endless loop": Attack(LOOP, SLOW, FAST),
    "sleeping": Attack("import time; time.sleep(1.0); print('WON')", SLOW, FAST),
    "a loop that no exception ends": Attack(STUBBORN, SLOW, FAST),
    "computing time": Attack(COMPUTE, down={"cpu_seconds": 10}, up={"cpu_seconds": 1}),
    "descriptors": Attack("files = [open('/dev/null') for _ in range(10_000)]; print('WON')"),
}
GROUPS = {
    "reads": READING, "writes": WRITING, "connects": NETWORK, "reaches": PROCESSES, "asks the kernel": KERNEL,
    "uses up": LIMITS,
}  # fmt: skip
ATTACKS = {
    f"{group}: {name}": attack for group, attacks in GROUPS.items() for name, attack in attacks.items()
}
