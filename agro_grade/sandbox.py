"""Processes for untrusted code, and the layers that isolate them.

Attacks on the layers show which ones work, since a layer may be installed but not allowed. The levels, each
with all of the previous ones:

- "limits": a separate process without environment variables, with limits on memory, time and file sizes.
  Files, network and other processes are open to it. If this process is root, each program runs as its own
  unprivileged user; else it can reach the process of its tests, and forge a pass.
- "namespaces": bubblewrap. No network, only the system's files, read-only, no other processes; at most
  `PROCESSES` of its own, each with the memory limit, and `FILES` in each of two folders.
- "full": also a system-call filter. No processes of its own, no new namespaces, no tracing, no uncounted
  memory: memfd, shared segments, queues.

If this process may divide a control group (version 2), that bounds the memory and processes of a sandbox
together, at each level.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from agro_grade.guest import encode

Level = Literal["limits", "namespaces", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
GUEST = Path(__file__).with_name("guest.py").read_text()
NOBODY = 65534  # the user of tests if this process is root; each program has one of these:
USERS = range(61184, 65520)  # systemd's dynamic users of services
GROUPS = Path("/sys/fs/cgroup")
LONGEST_LINE = 4 << 20  # bytes of a reply
FILES = 16 << 20  # most bytes of files that a process may write
PROCESSES = 64  # most processes and threads
START_SECONDS = 30.0
CLONE_THREAD = 0x00010000
DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "fork", "vfork", "unshare", "setns", "mount"),
    *("umount2", "pivot_root", "chroot", "bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key"),
    *("request_key", "io_uring_setup", "io_uring_enter", "io_uring_register", "open_by_handle_at"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "personality"),
    *("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "msgget", "semget", "mq_open"),
)
# Attacks, which return if they succeed, with the level that must stop them.
ATTACKS: dict[str, tuple[Level, str]] = {
    "environment": ("limits", "reads the environment's variables"),
    "memory": ("limits", "takes more memory than its limit"),
    "judge": ("namespaces", "reaches the process of its tests"),
    "network": ("namespaces", "connects to a server on this machine"),
    "read": ("namespaces", "reads a file outside"),
    "write": ("namespaces", "writes a file outside"),
    "process": ("namespaces", "sees the process that started it"),
    "files": ("namespaces", f"writes more than {2 * FILES >> 20} MiB of files"),
    "processes": ("namespaces", f"starts more than {PROCESSES} processes"),
    "fork": ("full", "starts a process"),
    "anonymous": ("full", "holds memory in a file without a name"),
    "segment": ("full", "holds a segment of shared memory"),
    "namespace": ("full", "makes a namespace of its own"),
}
ATTACKER = """
import ctypes, os, signal, socket
def nothing(): pass
def environment(name): return os.environ[name]
def memory(size): return len(bytearray(size))
def network(port): return socket.create_connection(("127.0.0.1", port), 2) and True
def read(path): return open(path).read()
def write(path): return open(path, "a").write("x")
def process(pid, command):
    if open(f"/proc/{pid}/cmdline").read() != command:
        raise OSError("another process")
def judge(pid):
    if pid == os.getpid():
        raise OSError("in a namespace of its own")
    os.kill(pid, 0)
def files(size):
    for folder in [f for f, _, _ in os.walk("/") if not f.startswith("/proc") and os.access(f, os.W_OK)]:
        try:
            for i in range(9):
                with open(f"{folder}/{i}.agro", "xb", 0) as file:
                    os.unlink(file.name)
                    while size > 0 and file.tell() < 8 << 20: size -= file.write(bytes(1 << 20))
                    os.dup(file.fileno())
        except OSError: pass
    if size > 0: raise OSError("full")
def processes(most):
    started = []
    try:
        for _ in range(most + 1):
            pid = os.fork()
            if pid == 0: signal.pause()
            started.append(pid)
    finally:
        for pid in started: os.kill(pid, signal.SIGKILL)
        for pid in started: os.waitpid(pid, 0)
def anonymous(): return os.memfd_create("")
def segment():
    if ctypes.CDLL(None, use_errno=True).shmget(0, ctypes.c_size_t(4096), 0o1600) < 0:
        raise OSError(ctypes.get_errno(), "shmget")
def fork():
    if os.fork() == 0:
        os._exit(0)
    return os.wait()[1]
def namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")
"""
ADVICE: dict[Level, str] = {
    "limits": "run it on Linux with another interpreter",
    "namespaces": "install bubblewrap, and allow unprivileged user namespaces; or use a sandbox on a server",
    "full": "pip install '.[sandbox]', which needs the system's libseccomp",
}


class NoSandbox(Exception):
    """The requested sandbox isn't available. The message says what to do."""


class GuestEnded(Exception):
    """A process in a sandbox ended, hung or sent an invalid answer."""


class Session(Protocol):
    """A program that answers requests, see `agro_grade.guest`."""

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The reply. Raises `GuestEnded` if none comes by `deadline`, on the monotonic clock."""
        ...

    def close(self) -> None: ...


class Sandbox(Protocol):
    @property
    def level(self) -> str:
        """For people."""
        ...

    def start(self, opening: Mapping[str, Any]) -> Session:
        """A session that begins with this message, which has no limits yet."""
        ...


class Guest:
    """A process in a sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], group: Path | None = None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid, self._group = process.pid, group
        self._process, self._in, self._out = process, process.stdin.fileno(), process.stdout.fileno()
        self._unread = bytearray()
        os.set_blocking(self._in, False)

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """See `Session.ask`."""
        self.write(request, deadline)
        return self.read(deadline)

    def write(self, message: Mapping[str, Any], deadline: float) -> None:
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        while unsent:
            if not select.select([], [self._in], [], _until(deadline))[1]:
                raise GuestEnded("timed out")
            try:
                unsent = unsent[os.write(self._in, unsent) :]
            except BrokenPipeError:
                raise GuestEnded(self._end()) from None

    def read(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            if len(self._unread) > LONGEST_LINE:
                raise GuestEnded(f"it answered with more than {LONGEST_LINE >> 20} MiB")
            if not select.select([self._out], [], [], _until(deadline))[0]:
                raise GuestEnded("timed out")
            received = os.read(self._out, 1 << 16)
            if not received:
                raise GuestEnded(self._end())
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise GuestEnded("its answer isn't a JSON object")
        return reply

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # without namespaces, its children too
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()
        if self._group is not None:
            _remove(self._group)

    def _end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return f"its process ended with status {self._process.wait(5)}"
        return "its process closed its pipe"


class LocalSandbox:
    """Processes on this machine."""

    def __init__(self, level: Level, memory_mb: int, interpreter: str) -> None:
        self.level: Level = level
        self.memory = memory_mb << 20
        self.interpreter = interpreter

    @classmethod
    def probed(cls, level: Level, memory_mb: int = 1024, interpreter: str | None = None) -> Self:
        """A sandbox that stops all attacks of its level. Raises `NoSandbox` if it doesn't."""
        sandbox = cls(level, memory_mb, interpreter or _system_interpreter())
        reached: Level | None = None
        for candidate in LEVELS[: LEVELS.index(level) + 1]:
            failure = cls(candidate, memory_mb, sandbox.interpreter).weakness()
            if failure is not None:
                weaker = ", or accept level = 'namespaces'" * (reached == "namespaces")
                raise NoSandbox(
                    f"expected a sandbox of the level {level!r}, but {failure}. What to do: "
                    f"{ADVICE[candidate]}{weaker}"
                )
            reached = candidate
        return sandbox

    def weakness(self) -> str | None:
        """The first attack that this sandbox should stop but doesn't; None if it stops all."""
        attacker = {"role": "program", "source": ATTACKER}
        try:
            with (
                _secrets() as arguments,
                closing(self.start(attacker)) as guest,
                closing(self.start({"role": "tests"})) as judge,
            ):
                arguments |= {"memory": [2 * self.memory], "files": [4 * FILES], "processes": [PROCESSES]}
                arguments["judge"] = [judge.pid]
                if not _succeeds(guest, "nothing", []):  # else no attack could succeed
                    return "no program answers in it"
                for name, (level, deed) in ATTACKS.items():
                    if name == "judge" and os.geteuid() == 0:
                        level = "limits"
                    expected = LEVELS.index(level) <= LEVELS.index(self.level)
                    if expected and _succeeds(guest, name, arguments.get(name, [])):
                        return f"a program in it {deed}"
        except (GuestEnded, OSError, NoSandbox) as error:
            return f"no program starts in one of the level {self.level!r}: {error}"
        return None

    def start(self, opening: Mapping[str, Any]) -> Guest:
        """See `Sandbox.start`."""
        filters = [_system_calls()] if self.level == "full" else []
        user = None
        if os.geteuid() == 0:
            user = NOBODY if opening["role"] == "tests" else USERS[next(_started) % len(USERS)]
        # The shell waits until it is in the control group, so that nothing starts outside of it.
        waiting = ["/bin/sh", "-c", 'read -r go; exec "$@"', "sh"]
        try:
            process = subprocess.Popen(
                [*waiting, *self._command(filters)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=filters,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        finally:
            for descriptor in filters:
                os.close(descriptor)
        guest = Guest(process, _control_group(process.pid, self.memory + 4 * FILES))
        limits = {"RLIMIT_AS": self.memory, "RLIMIT_FSIZE": FILES, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 64}
        if self.level != "limits" or user in USERS:  # else it counts others' processes
            limits["RLIMIT_NPROC"] = PROCESSES
        try:
            guest.write({}, time.monotonic() + START_SECONDS)
            guest.write({**opening, "limits": limits}, time.monotonic() + START_SECONDS)
        except BaseException:
            guest.close()
            raise
        return guest

    def _command(self, filters: Sequence[int]) -> list[str]:
        python = [self.interpreter, "-I", "-c", GUEST]
        if self.level == "limits":
            return python
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            raise NoSandbox("there is no bwrap (bubblewrap)")
        links = [(name, os.readlink(name)) for name in ("/bin", "/lib", "/lib64") if os.path.islink(name)]
        return [
            *(bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
            *("--ro-bind", "/usr", "/usr"),
            *(part for name, target in links for part in ("--symlink", target, name)),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(FILES), "--tmpfs", "/box"),
            *("--size", str(FILES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/"),
            *("--chdir", "/box", "--cap-drop", "ALL"),
            *(part for descriptor in filters for part in ("--seccomp", str(descriptor))),
            *("--", *python),
        ]


_started = itertools.count(secrets.randbelow(len(USERS)))


def _control_group(process: int, memory: int) -> Path | None:
    """The process's new control group (version 2) with limits on memory and processes; None if none can be
    made. It is a sibling of this process's group: only a group without processes may delegate controllers."""
    group = None
    try:
        current = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        parent = (GROUPS / current).parent if current else GROUPS
        if not {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
            return None
        group = parent / f"agro-{secrets.token_hex(8)}"
        group.mkdir()
        limits = {"memory.max": memory, "memory.oom.group": 1, "pids.max": 2 * PROCESSES}
        for name, value in (limits | {"cgroup.procs": process}).items():
            (group / name).write_text(f"{value}")
        with suppress(OSError):  # a kernel without swap
            (group / "memory.swap.max").write_text("0")
    except OSError:
        if group is not None:
            _remove(group)
        return None
    return group


def _remove(group: Path) -> None:
    for _ in range(50):  # until its processes have ended
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)


def _system_calls() -> int:
    """A descriptor of a file with the system-call filter, as bubblewrap reads it."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise NoSandbox(f"the filter of system calls can't be made ({error})") from None
    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    for name in DENIED:
        with suppress(ValueError):  # this machine has no such call
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # the C library then calls clone
    threads = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0)
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", threads)
    descriptor = os.memfd_create("system calls")
    with open(descriptor, "wb", closefd=False) as file:
        rules.export_bpf(file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@contextmanager
def _secrets() -> Iterator[dict[str, list[Any]]]:
    """The arguments of attacks: what each tries to reach in this process."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.write_text("secret")
        secret.chmod(0o666)
        yield {
            "environment": ["PATH"],
            "network": [server.getsockname()[1]],
            "read": [str(secret)],
            "write": [str(secret)],
            "process": [os.getpid(), Path("/proc/self/cmdline").read_text()],
        }


def _succeeds(guest: Guest, attack: str, arguments: list[Any]) -> bool:
    request = {"id": attack, "name": attack, "args": encode(arguments), "kwargs": encode({})}
    return "value" in guest.ask(request, time.monotonic() + START_SECONDS)


def _system_interpreter() -> str:
    """The system's Python, which other users may run too."""
    interpreter = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    if interpreter is None and os.geteuid() != 0:
        return sys.executable
    if interpreter is None:
        raise NoSandbox(
            "expected a python3 in /usr/bin, got none. What to do: install one, or name another interpreter"
        )
    return interpreter


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
