"""Programs as environments: what comes of those that end well, badly, and not at all."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from asking import HI

from agro.api.reporting_trainer import Trainer
from agro.config import EnvironmentConfig, RunConfig, SamplerConfig
from agro.door.harness import Harness
from agro.errors import Refused, remember_secret
from agro.io import plugins
from agro.rewards.protocol import Score
from agro.rollout import Task, collect
from agro.rollout.envs.process import load_environment
from agro.rollout.rollout import EpisodeReward, Rollout
from agro.store import Store
from agro.types import Prompt

AGENT = """
import json, os, sys, time, httpx
prompt, columns = json.loads(os.environ["AGRO_PROMPT"]), json.loads(os.environ["AGRO_COLUMNS"])
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
base, how = os.environ["OPENAI_BASE_URL"], columns.get("how", "well")
if how == "silent": sys.exit(0)
def call(messages):
    body = {"model": "gpt", "messages": messages, "max_tokens": 6, "temperature": 0.1}
    return httpx.post(base + "/chat/completions", json=body, headers=headers).raise_for_status().json()
first = call(prompt)["choices"][0]["message"]["content"]
if how == "hang": time.sleep(100)
if how == "die": sys.exit("it broke: " + os.environ["SECRET_WORD"])
more = [*prompt, {"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
call(more if how != "rewrite" else more[-1:])
result = os.environ["AGRO_RESULT"]
if how == "pipe": os.mkfifo(result)
elif how == "device": os.symlink("/dev/zero", result)
else: open(result, "w").write(columns.get("result", json.dumps({"reward": columns["worth"]})))
if how == "feedback":
    httpx.post(base + "/feedback", json={"reward": 7}, headers=headers).raise_for_status()
    assert httpx.post(base + "/feedback", json={"comment": "fine"}, headers=headers).status_code == 400
    assert httpx.get(base.partition("/s/")[0] + "/metrics", headers=headers).status_code == 200
sys.exit(int(columns.get("code", 0)))
"""


@pytest.fixture
def made(engine, tmp_path):
    """A function: options -> a rollout of the agent."""
    (tmp_path / "agent.py").write_text(AGENT)

    def make(**options) -> Rollout:
        given = {"env": {"SECRET_WORD": "please"}, "seconds": 30, **options}
        config = EnvironmentConfig(name=f"harness:{sys.executable} {tmp_path / 'agent.py'}", options=given)
        environment = Harness(config.name.partition(":")[2], given, config)
        return Rollout(engine.policy.encoder, engine, environment, 8)

    return make


def prompts(*hows: str, **columns) -> list[Prompt]:
    return [Prompt(HI, f"p{i}", {"how": how, "worth": 0.5, **columns}) for i, how in enumerate(hows)]


def sampled(rollout: Rollout, *asked: Prompt, n: int = 1) -> list:
    samples = list(rollout.sample(asked, n, SamplerConfig(max_new=16, temperature=0.8, batch=4), seed=1))
    return sorted(samples, key=lambda sample: sample.meta["index"])


def test_the_calls_of_a_program_are_an_episode(made, engine) -> None:
    well, rewrite, rewritten = sampled(made(reward="file"), *prompts("well", "rewrite"))
    assert (well.reward, well.meta["turns"], well.episode) == (0.5, 2, None)
    assert well.prompt_id == "p0"
    assert well.sampling["temperature"] == 0.8  # the run's, whatever the program asks
    runs = np.diff(well.action.astype(int)) == 1
    assert runs.sum() == 2  # two turns of the policy in one row
    assert well.action.sum() <= 12
    assert np.isfinite(well.behavior_logp[well.action]).all()
    assert rewrite.episode == rewritten.episode is not None
    assert rewrite.reward == rewritten.reward == 0.5
    text = engine.policy.encoder.decode(rewritten.context_tokens.tolist())
    assert "and?" in text
    assert "hi" not in text


def test_the_same_seed_gives_the_same_episodes(made) -> None:
    first, second = (sampled(made(reward="file"), *prompts("well"), n=3) for _ in range(2))
    assert [s.response for s in first] == [s.response for s in second]
    assert len({s.response for s in first}) == 3


def test_who_hangs_or_dies_has_a_failed_episode(made) -> None:
    """What it said is stored, without secrets."""
    remember_secret("please-keep-this")
    [hang] = sampled(made(reward="file", seconds=4), *prompts("hang"))
    rollout = made(reward="file", env={"SECRET_WORD": "please-keep-this"})
    die, silent = sampled(rollout, *prompts("die", "silent"))
    assert [sample.reward for sample in (hang, die, silent)] == [None] * 3
    assert [sample.meta["finish"] for sample in (hang, die, silent)] == ["error"] * 3
    assert "it exceeded" in hang.meta["reward_error"]
    assert "exit status 1; its output: it broke: (redacted)" in die.meta["reward_error"]
    assert "didn't call the model" in silent.meta["reward_error"]
    assert hang.action.sum() > 0
    assert silent.tokens is None


@pytest.mark.parametrize(
    ("reward", "how", "code", "expected"),
    [
        ("exit", "well", 0, 1),
        ("exit", "well", 1, 0),
        ("exit", "well", 3, None),
        ("feedback", "feedback", 0, 7),
        ("feedback", "well", 0, None),
        ("file", "well", 1, None),
    ],
)
def test_where_the_reward_is(made, reward, how, code, expected) -> None:
    [sample] = sampled(made(reward=reward), *prompts(how, code=code))
    assert sample.reward == expected
    assert ("reward_error" in sample.meta) == (expected is None)


RESULTS = ("{}", '{"reward": NaN}', '{"reward": 1%s}' % ("0" * 400), "[" * 9_000, "[1]", '{"reward": true}')


def test_whatever_the_file_of_the_reward_is_the_run_goes_on(made) -> None:
    asked = [Prompt(HI, f"p{i}", {"result": text, "worth": 0}) for i, text in enumerate(RESULTS)]
    samples = sampled(made(reward="file"), *asked, *prompts("pipe", "device", worth=0))
    assert [sample.reward for sample in samples] == [None] * (len(RESULTS) + 2)
    assert all("expected a number" in sample.meta["reward_error"] for sample in samples)


class Length:
    name, maximum = "length", None

    def score(self, samples) -> list[Score]:
        return [Score(float(len(sample.response))) for sample in samples]

    def close(self) -> None:
        pass


def test_the_runs_own_reward_scores_the_last_turn(made, tmp_path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        sampler = SamplerConfig(n=2, max_new=16)
        reward = EpisodeReward(Length())
        result = collect(made(reward="run"), prompts("well", "die"), sampler, store, Task(), reward)
        samples = list(store.samples(ids=result.ids))
    assert result.failed == 2
    for s in samples:
        assert s.reward == (len(s.meta["last_turn"]) if s.prompt_id == "p0" else None)


@pytest.fixture
def installed(monkeypatch) -> None:
    """Also where agro was installed before it had this environment."""
    others = plugins.installed

    def found(kind, builtin=()):
        of_agro = {"harness": "agro.door.harness:Harness"}
        return of_agro if kind == "environments" else others(kind, builtin)

    monkeypatch.setattr(plugins, "installed", found)


@pytest.mark.report
@pytest.mark.usefixtures("installed")
def test_a_run_trains_on_what_programs_did(engine, tmp_path) -> None:
    """The reward is the first letter's: the run's samples are on policy, and its updates move it. Its page is
    drawn, of responses with tool turns."""
    agent = AGENT.replace('columns["worth"]', 'float(ord(first[:1] or "a") > 80)')
    (tmp_path / "agent.py").write_text(agent)
    engine.policy.save(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "how": "well"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"harness:{sys.executable} {tmp_path / 'agent.py'}"
    config = RunConfig.of(
        {
            "policy": {"model": str(tmp_path / "model")},
            "data": {"prompts": str(tmp_path / "prompts.jsonl")},
            "sampler": {"n": 4, "max_new": 6},
            "environment": {"name": name, "options": {"reward": "file", "seconds": 60}},
            "objective": {"name": "agro", "beta": 0.01},
            "train": {"steps": 2, "groups": 2, "lr": 1e-3},
        },
        "test",
    )
    Trainer(config, tmp_path / "run").run()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    with Store.open(tmp_path / "run/store.db", read_only=True) as store:
        samples = list(store.samples())
    assert len(samples) == 16
    assert all(sample.reward in (0, 1) and sample.meta["turns"] == 2 for sample in samples)
    assert {sample.version for sample in samples} == {0, 1}
    step = next(row for row in rows if row["step"] == 2)
    assert step["staleness_mean"] == 0
    assert step["grad_norm"] > 0
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.usefixtures("installed")
def test_what_is_wrong_is_refused_first() -> None:
    config = EnvironmentConfig(name="harness:python")
    for command, options, message in (
        ("no-such-command x", {}, "expected an installed command"),
        ("python", {"reward": "luck"}, "options: reward: input should be"),
        ("python", {"seconds": 0}, "options: seconds: input should be greater than 0"),
        ("python", {"surprise": 1}, "options: unknown key surprise"),
    ):
        with pytest.raises(Refused, match=message):
            Harness(command, options, config)
    assert load_environment(config).name == "harness:python"
