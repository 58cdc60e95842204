"""The parent process of `worker.py`: what a reward function started ends with its worker.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import sys
import time

KILL_SECONDS = 5.0  # for killed processes to end
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


def supervise() -> None:
    """Return in a child process. This process ends as the child does, and kills all that it has started.

    Linux makes this process the parent of the descendants whose own parent ended, also in other sessions. It
    ends on SIGTERM too, or when the input closes because the trainer died. Elsewhere this does nothing.
    A PID namespace would need privileges, and give the functions of all workers the same process id, by which
    they may name their files.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0):
        return
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # by SIGCHLD
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(wakes)
        os.close(wake)
        os.setpgid(0, 0)  # signals for the function's process group don't reach this process
        return
    os.dup2(2, 1)  # the worker's end closes the replies
    status = None
    try:
        status = wait_for(worker, wakes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_children()
        end_like(status)


def wait_for(worker: int, wakes: int) -> int | None:
    """The worker's status when it ends; None when the input closes."""
    events = select.poll()
    events.register(0, 0)  # reports only that it was closed
    events.register(wakes, select.POLLIN)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            return status
        if pid:
            continue  # an orphan
        for descriptor, _ in events.poll():
            if descriptor == 0:
                return None
            os.read(wakes, 4096)


def kill_children() -> None:
    """Kill the children, then those that they leave behind, until there are none."""
    end = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            for pid in children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)


def children() -> list[int]:
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(name))
    return pids


def end_like(status: int | None) -> None:
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    supervise()
    runpy.run_path(os.path.join(os.path.dirname(__file__), "worker.py"), run_name="__main__")
