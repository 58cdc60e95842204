"""A user's function as a reward: the signatures of TRL and verl, and failures."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import is_running, until

from agro import config
from agro.errors import Refused
from agro.io import worker
from agro.rewards import FunctionReward, Score, load_reward
from agro.rewards import workers as calling
from agro.rewards.workers import Pool
from agro.types import Sample


@pytest.fixture
def write(tmp_path):
    def put(code, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return put


def scores(path, responses, *, metas=None, function="f", prompts=None, timeout=5.0, workers=1, **options):
    samples = [
        Sample(p, r, meta=m)
        for p, r, m in zip(prompts or ["p"] * len(responses), responses, metas or [{}] * len(responses))
    ]
    with closing(FunctionReward(f"{path}:{function}", options, timeout=timeout, workers=workers)) as reward:
        return reward.score(samples)


def outcome(found):
    return [s.error if s.value is None else s.value for s in found]


def test_trl_signature(write):
    path = write("""
        import json
        def f(prompts, completions, **columns):
            open(__file__ + ".seen", "w").write(json.dumps([prompts, completions, columns]))
            return [float(len(c)) for c in completions]
    """)
    chat = [{"role": "user", "content": "hi"}]
    tokens = {"tokens": np.array([5, 6, 7]), "action": np.array([False, True, True])}
    samples = [
        Sample(
            "a", "xy", meta={"answer": "1", "finish": "stop", "index": 0, "reward_error": "old"}, **tokens
        ),
        Sample(chat, "xyz", meta={"level": 3}),
    ]
    with closing(load_reward(config.RewardConfig(name=f"{path}:f", options={"scale": 2}))) as reward:
        assert reward.score(samples) == [Score(2.0), Score(1.0)]
    prompts, completions, columns = json.loads(Path(f"{path}.seen").read_text())
    assert prompts == ["a", chat]
    assert completions == ["xy", [{"role": "assistant", "content": "xyz"}]]
    assert columns == {
        "answer": ["1", None],
        "level": [None, 3],
        "completion_ids": [[6, 7], None],
        "scale": 2,
    }


def test_a_function_may_ask_how_responses_ended(write):
    path = write("""
        def f(completions, ends, thoughts):
            ends = [("cut", "finished", "unknown").index(end) for end in ends]
            return [e + 10 * ("open", "closed", None).index(t) for e, t in zip(ends, thoughts)]
        def g(completions, **columns):
            return [float(len(columns)) for _ in completions]
    """)
    metas = [{"finish": "length", "thought": "open"}, {"finish": "stop"}, {}]
    assert outcome(scores(path, ["a", "<think>b</think>", "c"], metas=metas)) == [0.0, 11.0, 22.0]
    assert outcome(scores(path, ["a"], metas=metas[:1], function="g")) == [2.0]  # prompts, completion_ids
    path = write("def h(completions, ends):\n    return ends", "own.py")
    assert outcome(scores(path, ["a"], metas=[{"ends": 7.0, "finish": "stop"}], function="h")) == [7.0]


def test_a_function_gets_only_what_it_names(write):
    path = write("""
        def f(completions, answer, bonus=0.0):
            return [float(c == a) + bonus for c, a in zip(completions, answer)]
        async def later(completions):
            return [1.5] * len(completions)
    """)
    metas = [{"answer": "a", "other": 1}, {"answer": "b", "other": 2}]
    assert outcome(scores(path, ["a", "a"], metas=metas, bonus=0.5)) == [1.5, 0.5]
    assert outcome(scores(path, ["a"], function="later")) == [1.5]


def test_module_from_the_working_folder(write, monkeypatch):
    write("def f(completions, **kw): return [2 for c in completions]", "my_rewards.py")
    monkeypatch.chdir(write("", "empty.py").parent)
    with closing(FunctionReward("my_rewards:f")) as reward:
        assert outcome(reward.score([Sample("p", "r")])) == [2.0]


def test_a_function_object(write, monkeypatch):
    path = write("def count(completions, **kw): return [len(c) for c in completions]", "module_of_mine.py")
    monkeypatch.syspath_prepend(path.parent)
    import module_of_mine

    with closing(FunctionReward(module_of_mine.count)) as reward:
        assert reward.name == "module_of_mine:count"
        assert outcome(reward.score([Sample("p", "four")])) == [4.0]
    with pytest.raises(Refused, match="can't be imported by another process"):
        FunctionReward(lambda completions: [])


def test_values_that_count_as_numbers(write):
    path = write("""
        import numpy as np
        def f(completions, **kw):
            return [1, True, np.float32(0.5), np.bool_(False), np.array(2)]
        def array(completions, **kw):
            return np.arange(len(completions))
    """)
    assert outcome(scores(path, list("abcde"))) == [1.0, 1.0, 0.5, 0.0, 2.0]
    assert outcome(scores(path, list("abc"), function="array")) == [0.0, 1.0, 2.0]


def test_only_responses_that_fail_stay_unknown(write):
    path = write("""
        def f(completions, **kw):
            return [one(c) for c in completions]
        def one(c):
            if c == "raise": raise ValueError(f"bad answer {c!r}")
            if c == "exit": raise SystemExit(3)
            odd = {"nan": float("nan"), "inf": -1e999, "none": None, "text": "1.0", "big": 10**400}
            return odd.get(c, 1.0)
    """)
    good = "ok"
    assert outcome(scores(path, [good, "nan", "inf", "none", "text", "big"])) == [
        1.0,
        "returned nan",
        "returned -inf",
        "returned None",
        "returned '1.0', expected a number",
        "returned an integer too large for a float",
    ]
    found = outcome(scores(path, [good, "raise", good, "exit", "nan"]))
    assert found == [
        1.0,
        "ValueError: bad answer 'raise' (mine.py:5)",
        1.0,
        "SystemExit: 3 (mine.py:6)",
        "returned nan",
    ]


def test_one_value_for_a_batch_is_refused_at_the_first(write):
    path = write("""
        def listed(completions, **kw): return [0.5]
        def bare(completions, **kw): return 0.5
        bare.maximum = 2
    """)
    for function in ("listed", "bare"):
        with pytest.raises(
            Refused, match=f"{function} returned one value, 0.5, for 2 responses; expected a list"
        ):
            scores(path, ["a", "b"], function=function)
    with pytest.raises(Refused, match="returned one value"):
        FunctionReward(lambda completions: 0.5, inline=True).score([Sample("p", "a"), Sample("p", "b")])


def test_a_refused_call_ends_its_own_worker_alone(write):
    path = write("""
        def f(completions, **kw): return 1.0 if completions[0] == "one" else [1.0] * len(completions)
    """)
    with closing(Pool(f"{path}:f", {}, timeout=10.0, workers=3)) as pool:
        before = {process.pid for process in pool._processes}
        with pytest.raises(Refused, match="one value"):
            pool.call({"prompts": ["", ""], "completions": ["one", "b"]}, 2, at_once=2)
        for _ in range(3):
            assert pool.call({"prompts": [""], "completions": ["x"]}, 1) == [(1.0, None)]
        assert len(before & {process.pid for process in pool._processes}) >= 2


def test_a_function_declares_its_maximum(write):
    path = write("""
        def f(completions, **kw): return [0.5 for _ in completions]
        f.maximum = 2
        def g(completions, **kw): return [0.5 for _ in completions]
    """)
    for name, most in (("f", 2.0), ("g", None)):
        with closing(FunctionReward(f"{path}:{name}")) as reward:
            assert reward.maximum == most


def test_wrong_lengths(write):
    path = write("""
        def short(completions, **kw): return [1.0] * 2
        def none(completions, **kw): pass
        def bare(completions, **kw): return 0.5
    """)
    assert "returned 2 values for 1 responses" in outcome(scores(path, ["a", "b", "c"], function="short"))[0]
    assert "returned None, expected a list" in outcome(scores(path, ["a"], function="none"))[0]
    assert "returned 0.5, expected a list" in outcome(scores(path, ["a"], function="bare"))[0]


def test_a_batch_that_fails_is_scored_again_row_by_row(write):
    path = write("""
        def f(completions, **kw):
            total = sum(float(c) for c in completions)
            return [float(c) + 0 * total for c in completions]
    """)
    assert outcome(scores(path, ["1", "nan", "2"])) == [1.0, "returned nan", 2.0]


def test_workers_that_time_out_or_crash_are_replaced(write):
    path = write("""
        import ctypes, os, signal, time
        def f(completions, **kw):
            return [one(c) for c in completions]
        def one(c):
            if c == "hang": time.sleep(60)
            if c == "exit": os._exit(7)
            if c == "crash": os.kill(os.getpid(), signal.SIGSEGV)
            if c == "killed": os.kill(os.getpid(), signal.SIGKILL)
            if c == "realtime": os.kill(os.getpid(), signal.SIGRTMIN + 1)
            return 1.0
    """)
    start = time.monotonic()
    assert outcome(
        scores(path, ["ok", "hang", "exit", "ok", "crash", "killed", "realtime"], timeout=1.5)
    ) == [
        1.0,
        "timed out after 1.5 s",
        "its process ended with status 7",
        1.0,
        "its process was killed by SIGSEGV",
        "its process was killed by SIGKILL (out of memory?)",
        "its process was killed by Real-time signal 1",
    ]
    assert time.monotonic() - start < 50  # less than the sleep


def test_out_of_memory_fails_one_response(write):
    path = write("""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        def f(completions, **kw):
            return [float(len("x" * (1 << 30 if c == "big" else 1))) for c in completions]
    """)
    found = outcome(scores(path, ["ok", "big"]))
    assert found == [1.0, "MemoryError (mine.py:5)"]


def test_a_slow_function_does_not_time_out(write):
    """3 × 0.5 s is over the limit of one response: the first batch is scored again one by one.

    The second isn't.
    """
    path = write("""
        import time
        def f(completions, **kw):
            time.sleep(0.5 * len(completions))
            return [float(len(completions))] * len(completions)
    """)
    with closing(FunctionReward(f"{path}:f", timeout=1.3)) as reward:
        samples = [Sample("p", c) for c in "abc"]
        assert outcome(reward.score(samples)) == [1.0, 1.0, 1.0]
        assert outcome(reward.score(samples)) == [3.0, 3.0, 3.0]


def test_order_is_kept_over_workers(write):
    path = write("""
        import os, time
        def f(completions, **kw):
            time.sleep(0.05 * (int(completions[0]) == 0))
            if "5" in completions and len(completions) > 1: raise ValueError
            return [float(c) for c in completions]
        def pid(completions, **kw):
            time.sleep(0.1)
            return [os.getpid()] * len(completions)
    """)
    assert outcome(scores(path, [str(i) for i in range(10)], workers=3)) == [float(i) for i in range(10)]
    assert len(set(outcome(scores(path, ["a", "b", "c"], function="pid", workers=3)))) == 3
    assert scores(path, [], workers=2) == []


def test_large_batches_and_odd_text(write):
    path = write("def f(completions, **kw): return [len(c) for c in completions]")
    texts = ["x" * 3_000_000, "\ud800 \u2028\n\x00", ""]
    assert outcome(scores(path, texts)) == [3_000_000.0, 5.0, 0.0]


def test_printing_and_reading_stay_out_of_the_protocol(write, capfd):
    path = write("""
        import os, sys
        print("on import")
        def f(completions, **kw):
            print('{"id": 1}'); os.system("echo from a shell")
            assert sys.stdin.read() == ""
            return [1.0]
    """)
    assert outcome(scores(path, ["a"])) == [1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert all(text in err for text in ("on import", '{"id": 1}', "from a shell"))


DAEMON = """
    import os, sys, time
    for leave in (os.setsid, lambda: None):
        if os.fork():
            os._exit(0)
        leave()
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, sys.argv[1])
    time.sleep(60)
"""
STARTS = """
    import os, subprocess, sys, time
    def f(completions, **kw):
        pid_file = __file__ + ".pid"
        subprocess.Popen([sys.executable, os.path.dirname(__file__) + "/daemon.py", pid_file])
        while not os.path.exists(pid_file): time.sleep(0.01)
        if completions[0] == "hang": time.sleep(60)
        if completions[0] == "exit": os._exit(3)
        if completions[0] == "group": os.killpg(0, 9)
        return [1.0]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over")
@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("hang", "timed out after 4 s"),
        ("exit", "its process ended with status 3"),
        ("group", "its process was killed by SIGKILL (out of memory?)"),
        ("return", 1.0),
    ],
)
def test_daemons_end_with_the_worker(write, text, result):
    write(DAEMON, "daemon.py")
    path = write(STARTS)
    assert outcome(scores(path, [text], timeout=4.0)) == [result]
    until(lambda: not is_running(int(Path(f"{path}.pid").read_text())), 30)


PARENT = """
    import sys, time
    from agro.rewards import FunctionReward
    from agro.types import Sample
    reward = FunctionReward(sys.argv[1] + ":f", timeout=60.0)
    print("ready", flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [
        ("reward.score([Sample('p', 'r')])", signal.SIGINT),
        ("time.sleep(60)", signal.SIGKILL),
    ],
)
def test_workers_end_with_the_trainer(write, then, number):
    path = write("""
        import os, time
        open(__file__ + ".pid", "w").write(str(os.getpid()))
        def f(completions, **kw): time.sleep(60)
    """)
    parent = write(PARENT.format(then=then), "parent.py")
    process = subprocess.Popen(
        [sys.executable, str(parent), str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    pid = int(Path(f"{path}.pid").read_text())
    assert is_running(pid)
    time.sleep(0.3)
    process.send_signal(number)
    process.wait(60)
    process.stdout.close()
    until(lambda: not is_running(pid), 30)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over")
def test_daemons_end_with_a_killed_trainer(write):
    write(DAEMON, "daemon.py")
    path = write(STARTS)
    parent = write(PARENT.format(then="reward.score([Sample('p', 'hang')])"), "parent.py")
    process = subprocess.Popen([sys.executable, str(parent), str(path)], stderr=subprocess.DEVNULL)
    pid_file = Path(f"{path}.pid")
    end = time.monotonic() + 60
    while not pid_file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    until(lambda: not is_running(int(pid_file.read_text())), 30)


def test_a_worker_in_c_code_ends_at_its_time_limit(write):
    """A regular expression holds the interpreter's lock: only the kernel's timer can end it."""
    path = write("""
        import os, re
        def f(completions, **kw):
            open(__file__ + ".pid", "w").write(str(os.getpid()))
            return [bool(re.match("(a|a)*$", "a" * 80 + "b"))]
    """)
    code = Path(worker.__file__).read_text().replace("GRACE = 5.0", "GRACE = 0.2")
    copy = write(code, "quick_worker.py")
    process = subprocess.Popen([sys.executable, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    for message in (
        {"function": f"{path}:f", "path": sys.path, "options": {}, "limit": 5},
        {"id": 1, "n": 1, "how": "rows", "arguments": {"completions": ["a"]}, "limit": 0.3},
    ):
        process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    assert process.wait(60) == -signal.SIGALRM
    process.communicate()


def test_an_interrupt_leaves_the_reward_usable(write):
    path = write("""
        import os, signal, time
        def f(completions, **kw):
            if "slow" in completions:
                os.kill(kw["trainer"], signal.SIGINT); time.sleep(0.2)
            return [float(len(c)) for c in completions]
    """)
    with closing(FunctionReward(f"{path}:f", {"trainer": os.getpid()})) as reward:
        with pytest.raises(KeyboardInterrupt):
            reward.score([Sample("p", "slow"), Sample("p", "second")])
        time.sleep(0.3)
        assert outcome(reward.score([Sample("p", "abc")])) == [3.0]
    with pytest.raises(RuntimeError, match="closed"):
        reward.score([Sample("p", "abc")])


def test_a_worker_that_died_between_calls_fails_no_response(write):
    path = write("""
        import os, threading
        def f(completions, **kw):
            threading.Timer(0.1, os._exit, [1]).start()
            return [1.0]
    """)
    with closing(FunctionReward(f"{path}:f")) as reward:
        assert outcome(reward.score([Sample("p", "a")])) == [1.0]
        time.sleep(0.5)
        assert outcome(reward.score([Sample("p", "a")])) == [1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:f",
            "no_such_module can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("jsom:loads", "; did you mean json or ijson?"),
        ("{tmp}/mime.py:f", "mime.py; did you mean mine.py?"),
        ("{tmp}/mine.py:rewrad", "mine.py has no 'rewrad'; did you mean reward?"),
        ("{tmp}/mine.py:zzzzzz", "it has number, Scorer, reward, other"),
        ("{tmp}/mine.py:number", "is of type int, not a function"),
        ("{tmp}/mine.py:Scorer", "is a class; give a function, or a callable instance of the class"),
        ("{tmp}/mine.py:", "module:NAME or file.py:NAME, got"),
        (
            "{tmp}/mine.py:other",
            "expected f(prompts, completions, **columns) or "
            "f(data_source, solution_str, ground_truth, extra_info), got f(x)",
        ),
        (
            "{tmp}/broken.py:f",
            "broken.py can't be imported: ZeroDivisionError: division by zero (broken.py:2)",
        ),
        ("{tmp}/syntax.py:f", "SyntaxError: expected ':' (syntax.py:1)"),
        ("{tmp}/leaves.py:f", "its process ended with status 4 while importing"),
        ("{tmp}/needs.py:f", "No module named 'nothing_like_it' (needs.py:1)"),
    ],
)
def test_a_function_that_fails_to_import_is_refused(write, tmp_path, name, message):
    write(
        "number = 1\nclass Scorer: pass\ndef reward(completions, **kw): pass\ndef other(x): pass", "mine.py"
    )
    write("# a comment\n1 / 0", "broken.py")
    write("def f()", "syntax.py")
    write("import os; os._exit(4)", "leaves.py")
    write("import nothing_like_it", "needs.py")
    with pytest.raises(Refused) as refused:
        load_reward(config.RewardConfig(name=name.format(tmp=tmp_path)))
    assert message in str(refused.value)


def test_options_that_the_function_does_not_take_are_refused(write):
    path = write("def f(completions, weight=1.0): return [weight] * len(completions)")
    with pytest.raises(
        Refused, match=r"reward.options.wieght: .* takes no such argument; did you mean weight\?"
    ):
        FunctionReward(f"{path}:f", {"wieght": 2})
    with pytest.raises(Refused, match=r"reward.options.completions: .* come from the samples"):
        FunctionReward(f"{path}:f", {"completions": 2})
    reward = FunctionReward(f"{path}:f", {"weight": 2})
    with closing(reward), pytest.raises(Refused, match="the samples have a column of this name too"):
        reward.score([Sample("p", "r", meta={"weight": 1})])


def test_the_worker_needs_the_standard_library_only_and_starts_at_once():
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "bad = {'agro', 'torch', 'numpy'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code, worker.__file__], check=True, timeout=120)


COLUMNS = {"data_source": "gsm8k", "ground_truth": "1", "extra_info": {"index": 7}}  # of verl


def test_arguments_come_from_the_columns(write):
    path = write("""
        import json
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
            row = json.dumps([data_source, solution_str, ground_truth, extra_info])
            print(row, file=open(__file__ + ".seen", "a"))
            return {"score": scale * (solution_str == str(ground_truth)), "pred": solution_str}
    """)
    metas = [
        COLUMNS | {"answer": "no", "reward_model": {"ground_truth": "no"}},
        {"reward_model": {"style": "rule", "ground_truth": 2}, "answer": "no"},
        {"answer": "3"},
        {"reward_model": "no object"},
    ]
    missing = "the sample has no ground_truth, reward_model.ground_truth or answer"
    found = outcome(scores(path, ["1", "2", "4", "5"], metas=metas, function="compute_score", scale=0.5))
    assert found == [0.5, 0.5, 0.0, missing]
    seen = [json.loads(line) for line in Path(f"{path}.seen").read_text().splitlines()]
    assert seen == [["gsm8k", "1", "1", {"index": 7}], [None, "2", 2, {}], [None, "4", "3", {}]]


def test_a_function_gets_only_what_it_names_and_fails_row_by_row(write):
    path = write("""
        def compute_score(solution_str, ground_truth):
            if solution_str == "raise": raise ValueError("bad")
            return {"nan": float("nan"), "dict": {"acc": 1}, "none": None}.get(solution_str, 1)
    """)
    responses = ["ok", "raise", "nan", "dict", "none"]
    assert outcome(scores(path, responses, metas=[COLUMNS] * 5, function="compute_score")) == [
        1.0,
        "ValueError: bad (mine.py:3)",
        "returned nan",
        "returned {'acc': 1}, expected a number",
        "returned None",
    ]


def test_async_scores_run_together(write):
    """20 responses that take half a second each: 10 s one after the other. One that fails spoils no other."""
    path = write("""
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0.5)
            return 1 / int(solution_str)
    """)
    start = time.monotonic()
    responses = [str(i) for i in range(20)]
    found = outcome(scores(path, responses, metas=[COLUMNS] * 20, function="compute_score"))
    assert found == ["ZeroDivisionError: division by zero (mine.py:5)", *(1 / i for i in range(1, 20))]
    assert time.monotonic() - start < 9


def test_an_async_function_of_lists_is_called_once_for_a_workers_share(write):
    path = write("""
        import asyncio
        async def one(c):
            await asyncio.sleep(0.5)
            return float(len(c))
        async def f(completions, **columns):
            return await asyncio.gather(*map(one, completions))
    """)
    start = time.monotonic()
    assert outcome(scores(path, ["r" * i for i in range(20)])) == [float(i) for i in range(20)]
    assert time.monotonic() - start < 9


def test_options_that_the_samples_give_are_refused(write):
    path = write("def f(solution_str, ground_truth): pass")
    with pytest.raises(
        Refused, match=r"reward.options.ground_truth: data_source, solution_str, .* come from"
    ):
        FunctionReward(f"{path}:f", {"ground_truth": 1})


def test_a_call_that_was_given_up_reads_from_no_other_pipe(monkeypatch):
    """What reads is still blocked when its pipe is closed, whose descriptor another pipe gets."""
    monkeypatch.setattr(calling, "END_SECONDS", 0.01)
    (of, reply), (sink, to) = os.pipe(), os.pipe()
    stdin, stdout = os.fdopen(to, "wb", 0), os.fdopen(of, "rb", 0)
    process = SimpleNamespace(stdin=stdin, stdout=stdout, terminate=lambda: None, pid=-1)
    monkeypatch.setattr(calling, "_ask_to_end", lambda process: None)
    with pytest.raises(TimeoutError):
        calling._exchange(process, {}, 0.01)
    [asking] = [each for each in threading.enumerate() if each.name.endswith("(ask)")]
    other, written = os.pipe()
    stdout.close()
    stdin.close()
    os.dup2(other, of)
    os.write(written, b"of another worker")
    os.write(reply, b"late")
    asking.join(5)
    assert not asking.is_alive()
    assert os.read(of, 100) == b"of another worker"
    for descriptor in {other, of, written, reply, sink}:
        os.close(descriptor)
