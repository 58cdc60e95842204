"""verl's `compute_score` as a reward, and async functions."""

import json
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from agro import config
from agro.errors import Refused
from agro.rewards import Score, load_reward
from agro.types import Sample

COLUMNS = {"data_source": "gsm8k", "ground_truth": "1", "extra_info": {"index": 7}}


def scores(tmp_path, code, metas, responses=None, timeout=5.0, **options):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(code))
    samples = [Sample("p", r, meta=m) for r, m in zip(responses or ["r"] * len(metas), metas, strict=True)]
    with closing(
        load_reward(config.RewardConfig(name=f"{path}:compute_score", options=options, timeout=timeout))
    ) as reward:
        found = reward.score(samples)
    return [s.error if s.value is None else s.value for s in found]


def test_arguments_come_from_the_columns(tmp_path):
    code = """
        import json
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
            row = json.dumps([data_source, solution_str, ground_truth, extra_info])
            print(row, file=open(__file__ + ".seen", "a"))
            return {"score": scale * (solution_str == str(ground_truth)), "pred": solution_str}
    """
    metas = [
        COLUMNS | {"answer": "no", "reward_model": {"ground_truth": "no"}},
        {"reward_model": {"style": "rule", "ground_truth": 2}, "answer": "no"},
        {"answer": "3"},
        {"reward_model": "no object"},
    ]
    assert scores(tmp_path, code, metas, ["1", "2", "4", "5"], scale=0.5) == [
        0.5,
        0.5,
        0.0,
        "the sample has no ground_truth, reward_model.ground_truth or answer",
    ]
    seen = [json.loads(line) for line in Path(f"{tmp_path}/mine.py.seen").read_text().splitlines()]
    assert seen == [["gsm8k", "1", "1", {"index": 7}], [None, "2", 2, {}], [None, "4", "3", {}]]


def test_a_function_gets_only_what_it_names_and_fails_row_by_row(tmp_path):
    code = """
        def compute_score(solution_str, ground_truth):
            if solution_str == "raise": raise ValueError("bad")
            return {"nan": float("nan"), "dict": {"acc": 1}, "none": None}.get(solution_str, 1)
    """
    assert scores(tmp_path, code, [COLUMNS] * 5, ["ok", "raise", "nan", "dict", "none"]) == [
        1.0,
        "ValueError: bad (mine.py:3)",
        "returned nan",
        "returned {'acc': 1}, expected a number",
        "returned None",
    ]


def test_async_scores_run_together(tmp_path):
    """20 responses that take half a second each: 10 s one after the other. One that fails spoils no other."""
    code = """
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0.5)
            return 1 / int(solution_str)
    """
    start = time.monotonic()
    found = scores(tmp_path, code, [COLUMNS] * 20, [str(i) for i in range(20)])
    assert found == ["ZeroDivisionError: division by zero (mine.py:5)", *(1 / i for i in range(1, 20))]
    assert time.monotonic() - start < 9


def test_an_async_function_of_lists_is_called_once_for_a_workers_share(tmp_path):
    path = tmp_path / "trl.py"
    path.write_text(
        textwrap.dedent("""
        import asyncio
        async def one(c):
            await asyncio.sleep(0.5)
            return float(len(c))
        async def f(completions, **columns):
            return await asyncio.gather(*map(one, completions))
    """)
    )
    with closing(load_reward(config.RewardConfig(name=f"{path}:f"))) as reward:
        start = time.monotonic()
        assert reward.score([Sample("p", "r" * i) for i in range(20)]) == [Score(float(i)) for i in range(20)]
        assert time.monotonic() - start < 9


def test_options_that_the_samples_give_are_refused(tmp_path):
    with pytest.raises(
        Refused, match=r"reward.options.ground_truth: data_source, solution_str, .* come from"
    ):
        scores(tmp_path, "def compute_score(solution_str, ground_truth): pass", [COLUMNS], ground_truth=1)
