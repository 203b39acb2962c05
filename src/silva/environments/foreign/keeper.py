"""Keeps a command: `python -I -S keeper.py FOLDER COMMAND...`; imports nothing of Silva.

It ends the command, and all that has come of it, when the command has ended or when its own standard input
does, and then removes FOLDER. On Linux processes that have left the command's session are found too: those
whose parent is gone become children of the keeper.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    folder, command = sys.argv[1], sys.argv[2:]
    linux = sys.platform == "linux"
    if linux:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if not child:
        begin(folder, command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = wait(child)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    left = True
    while left:
        with contextlib.suppress(OSError):
            for each in children() if linux else ():
                os.kill(each, signal.SIGKILL)
        try:
            found, code = os.waitpid(-1, 0)
            status = os.waitstatus_to_exitcode(code) if found == child else status
        except ChildProcessError:
            left = False
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(status if status >= 0 else 128 - status)


def begin(folder: str, command: list[str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.chdir(folder)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def wait(child: int) -> int:
    """The command's status, or -SIGKILL once standard input has ended."""
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        found, code = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(code)
        ready = select.select([0, ended], [], [], 60.0)[0]
        if 0 in ready:
            return -signal.SIGKILL
        if ready:
            os.read(ended, 64)


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(each) for each in file.read().split()]


if __name__ == "__main__":
    main()
