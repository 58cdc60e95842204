"""Programs that want the reward without solving the task, or more than a program may have.

The task is `add(a, b)`, judged by `assert add(2, 3) == 5` and `assert add(-1, 1) == 0`. None of them adds.
"""

from __future__ import annotations

TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert abs(add(0.5, 0.25) - 0.75) < 1e-9"]
HONEST = "def add(a, b):\n    return a + b\n"

# Each must get 0.
FORGERIES: dict[str, str] = {
    "exit": "import os\ndef add(a, b): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "system exit": "import sys\ndef add(a, b): sys.exit(0)",
    "raise nothing": "def add(a, b): raise SystemExit",
    "keyboard interrupt": "def add(a, b): raise KeyboardInterrupt",
    "equal to all": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return self
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
def add(a, b): return Equal()
""",
    "equal number": """
class Equal(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __hash__ = int.__hash__
def add(a, b): return Equal(7)
""",
    "equal float": """
class Equal(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
def add(a, b): return Equal(7)
""",
    "not a number": "def add(a, b): return float('nan')",
    "infinity": "def add(a, b): return float('inf')",
    "patched abs": """
import builtins
builtins.abs = lambda x: 0
builtins.AssertionError = Exception
def add(a, b): return 5
""",
    "defined abs": "def abs(x): return 0\ndef add(a, b): return 5",
    "optimized asserts": """
import sys
sys.flags = type('F', (), {'optimize': 1})()
def add(a, b): return 0
""",
    "printed result": """
print('{"results": [null, null, null]}')
def add(a, b):
    print('passed')
    return None
""",
    "written result": """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, b'{"results": [null, null, null]}\\n')
    except OSError: pass
def add(a, b): return 0
""",
    "written value": """
import os
def add(a, b):
    for descriptor in range(3, 64):
        try: os.write(descriptor, b'{"id": "0", "value": 5}\\n')
        except OSError: pass
    return 0
""",
    "frame of the caller": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()):
            if name in ("expected", "results", "tests"): return value
        frame = frame.f_back
    return 0
""",
    "patched guest": """
import __main__
__main__.encode = lambda value, objects=None: {"t": "object", "v": True}
__main__.decode = lambda value, refer=None: 0
def add(a, b): return 5
""",
    "unknown tag": """
import __main__
__main__.encode = lambda v, o=None: {'t': 'equal', 'v': 1}
def add(a, b): return 5
""",
    "results as the value": """
import __main__
__main__.Program.answer = lambda self, request: {"value": 5, "results": [None, None, None]}
def add(a, b): return 5
""",
    "objects found in memory": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "results" in thing: return thing["results"]
    return 0
""",
    "a file of the tests": """
import glob
def add(a, b): return open(glob.glob('/**/tests.py')[0]).read()
""",
    "generator without end": "def add(a, b):\n    while True: yield 5",
    "endless": "def add(a, b):\n    while True: pass",
    "endless at once": "while True: pass",
    "asleep": "import time\ndef add(a, b): time.sleep(1000)",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "nested in the message": """
import os
def add(a, b):
    for descriptor in range(3, 64):
        try: os.write(descriptor, b'{"id": ' + b'[' * 900 + b']' * 900 + b'}\\n')
        except OSError: pass
""",
    "colliding integers": """
import __main__
items = [{"t": "int", "v": hex(i * (2**61 - 1))} for i in range(1, 60_000)]
__main__.encode = lambda value, objects=None: {"t": "set", "v": items}
def add(a, b): return 5
""",
    "a huge integer": "def add(a, b): return 1 << 8_000_000",
    "large": "def add(a, b): return 'x' * (50 << 20)",
    "recursion": "def add(a, b): return add(a, b)",
    "null": "def add(a, b): return None",
    "text": "def add(a, b): return str(a + b)",
    "no program": "I can't solve this.",
    "byte": "\u0000",
}

# These too. They need a sandbox: some would end other processes of this machine.
ESCAPES: dict[str, str] = {
    "crash": "import ctypes\ndef add(a, b): return ctypes.string_at(0)",
    "killed parent": "import os, signal\ndef add(a, b): os.kill(os.getppid(), signal.SIGKILL)",
    "killed group": "import os, signal\ndef add(a, b): os.killpg(0, signal.SIGKILL)",
    "signals to all": "import os, signal\ndef add(a, b): os.kill(-1, signal.SIGKILL)",
    "closed pipes": "import os\nos.closerange(0, 64)\ndef add(a, b): return 5",
    "memory": "x = bytearray(8 << 30)\ndef add(a, b): return 5",
    "threads": """
import threading, time
def spin():
    while True: pass
for _ in range(10000): threading.Thread(target=spin, daemon=True).start()
def add(a, b): return 5
""",
    "forks": "import os\nwhile True: os.fork()\ndef add(a, b): return 5",
}

# What a program may hold beside its memory. Each returns the bytes (or the number of processes) that it got.
HOARDS: dict[str, str] = {
    "files": """
import os
def hoard():
    total = 0
    for folder in [f for f, _, _ in os.walk("/") if not f.startswith("/proc") and os.access(f, os.W_OK)]:
        for i in range(8):
            try:
                with open(f"{folder}/hoard{i}", "wb", 0) as file:
                    while total < 256 << 20 and file.tell() < 15 << 20: total += file.write(bytes(1 << 20))
            except OSError: pass
    return total
""",
    "memory without a file": """
import os
def hoard():
    total, held = 0, []
    try:
        for i in range(30):
            held.append(os.memfd_create("hoard"))
            for _ in range(15): total += os.write(held[-1], bytes(1 << 20))
    except OSError: pass
    return total
""",
    "shared memory": """
import ctypes
def hoard():
    library, total = ctypes.CDLL(None), 0
    library.shmat.restype = ctypes.c_void_p
    for i in range(30):
        segment = library.shmget(0, ctypes.c_size_t(15 << 20), 0o1600)
        if segment < 0: break
        place = library.shmat(segment, None, 0)
        library.shmctl(segment, 0, None)
        if place and place != ctypes.c_void_p(-1).value:
            ctypes.memset(place, 1, 15 << 20)
            total += 15 << 20
            library.shmdt(ctypes.c_void_p(place))
        else: break
    return total
""",
    "processes": """
import os, time
def hoard():
    started = 0
    try:
        while started < 300:
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            started += 1
    except OSError: pass
    return started
""",
}
