"""Run a configuration and kill this very process, without warning, at the given event of the run.

python killed.py CONFIG OUT EVENT RESUME   (EVENT 0: don't; the number of events is printed)

Events are what a run does to the world: SQL statements, files opened, renamed, removed, and the places between two
pieces of work. Counting them instead of seconds makes a test say the same on a slow machine.
"""

import itertools
import os
import signal
import sys

import agro.train.loop
from agro.config import RunConfig
from agro.store.database import Database
from agro.train.interruption import Interruption

FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}

if __name__ == "__main__":
    config, out, event, resume = sys.argv[1:]
    agro.train.loop.report = lambda folder: folder
    trainer = agro.train.loop.Trainer(RunConfig.load(config), out, resume=resume == "resume")
    events = itertools.count(1)
    last = 0

    def tick() -> None:
        global last
        last = next(events)
        if last == int(event):
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(plain):
        def call(*args, **kwargs):
            tick()
            return plain(*args, **kwargs)

        return call

    Database._run = counted(Database._run)
    Interruption.check = counted(Interruption.check)
    sys.addaudithook(lambda name, args: tick() if name in FILES else None)
    trainer.run()
    print(last)
