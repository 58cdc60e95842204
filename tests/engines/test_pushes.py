"""New weights on servers: each way to push them, what vLLM makes of some silently, and several servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from stand_in import StandIn, moved, serving

from agro import config
from agro.config import LoRA, PolicyConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines import NoServer, Request
from agro.rollout.engines.connection import Failed, dialect_of
from agro.rollout.engines.server import Server
from agro.types import Prompt

ROUNDED = 1e-6  # nats a token: what float32 makes of log-probs of about 2


def server(opened: ExitStack, start: str) -> tuple[str, StandIn]:
    return opened.enter_context(serving(Policy.load(PolicyConfig(model=start))))


def engine(
    opened: ExitStack, policy: Policy, *urls: str, said: list[str] | None = None, **settings
) -> Server:
    values = {"kind": "server", "urls": urls, "retries": 1, **settings}
    made = Server(
        config.EngineConfig(**values), policy.encoder, say=[].append if said is None else said.append
    )
    opened.callback(made.close)
    return made


def pushing(opened: ExitStack, start: str, **settings) -> tuple[Policy, StandIn, Server]:
    """A policy, a server, and an engine that pushes the policy's weights to it."""
    url, state = server(opened, start)
    policy = Policy.load(PolicyConfig(model=start))
    return policy, state, engine(opened, policy, url, **settings)


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_a_push_is_proved_and_its_error_is_rounding(opened, start: str, tmp_path: Path, way: str) -> None:
    policy, state, made = pushing(opened, start, push=way)
    for version in (1, 2):
        made.load(moved(policy, tmp_path / f"{version}", way), version)
        assert made.version == version
        assert made.measured["push_error"] < ROUNDED
        assert made.measured["servers"] == 1
    served = dict(state.engine.policy.model.named_parameters())
    for name, weight in policy.model.named_parameters():
        torch.testing.assert_close(served[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("way", "push", "words"),
    [
        ("reload", "stale head", "a tied output layer that the server left as it was"),
        ("reload", "half", "half of a checkpoint"),
        ("transfer", "half", "a backend that doesn't load all weights"),
        ("reload", "nothing", "nothing arrived"),
        ("transfer", "nothing", "nothing arrived"),
    ],
)
def test_a_push_that_silently_fails_is_refused(
    opened, start: str, tmp_path: Path, way: str, push: str, words: str
) -> None:
    """The distance in the message is that of the log-probs before and after the push, computed here."""
    torch.manual_seed(0)
    policy, state, made = pushing(opened, start, push=way)
    made.load(moved(policy, tmp_path / "1", way), 1)
    state.push = push
    with pytest.raises(Refused, match=words) as refused:
        made.load(moved(policy, tmp_path / "2", way), 2)
    text = str(refused.value)
    off = logp(policy) - logp(state.engine.policy)
    assert f"{np.abs(off).mean():.3g} nats a token off" in text
    assert np.abs(off).mean() > 0.001
    assert made.hosts[0].url in text
    assert "engine.push_error = 0.001" in text
    assert made.version == 1


def logp(policy: Policy) -> np.ndarray:
    """Of the tokens of a probe, whose lengths the model's context of 16 limits."""
    random = np.random.default_rng(0)
    found = []
    for length in (5, 15, 15, 15):
        ids = torch.tensor(random.integers(0, len(policy.tokenizer), length))[None]
        with torch.no_grad():
            all_of = policy.model(input_ids=ids).logits.log_softmax(-1)
        found.append(all_of[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy())
    return np.concatenate(found)


def test_a_server_of_another_dtype_is_named_and_may_be_allowed(opened, start: str, tmp_path: Path) -> None:
    url, _ = opened.enter_context(serving(Policy.load(PolicyConfig(model=start, dtype="bfloat16"))))
    policy = Policy.load(PolicyConfig(model=start))
    with torch.no_grad():
        for weight in policy.weights().values():  # so that rounding shows in the logits
            weight.mul_(4)
    folder = moved(policy, tmp_path / "1", "reload")
    with pytest.raises(Refused, match=r"start vLLM with --dtype as policy\.dtype"):
        engine(opened, policy, url).load(folder, 1)
    made = engine(opened, policy, url, push_error=0.05)
    made.load(folder, 1)
    assert 0.001 < made.measured["push_error"] < 0.05


def test_the_bound_is_the_users(opened, start: str, tmp_path: Path) -> None:
    url, state = server(opened, start)
    policy = Policy.load(PolicyConfig(model=start))
    state.push = "nothing"
    for number, (limit, fits) in enumerate([(0.0, True), (9.0, True), (None, False)]):
        made = engine(opened, policy, url, push_error=limit)
        folder = moved(policy, tmp_path / f"{number}", "reload")
        if fits:
            made.load(folder, 1)
            assert made.measured["push_error"] > 0.001
        else:
            with pytest.raises(Refused, match=r"engine\.push_error"):
                made.load(folder, 1)


@pytest.fixture
def tuned(start: str) -> Policy:
    return Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)), seed=1)


def test_adapters_have_a_new_name_each_time_and_old_ones_are_unloaded(
    opened, start: str, tuned: Policy, tmp_path: Path
) -> None:
    url, state = server(opened, start)
    made = engine(opened, tuned, url, model="model")
    for version, kept in ((1, ["agro@1"]), (2, ["agro@1", "agro@2"]), (3, ["agro@2", "agro@3"])):
        made.load(moved(tuned, tmp_path / f"{version}", "adapter"), version)
        assert made.measured["push_error"] < ROUNDED
        names = list(state.adapters)
        assert [name.partition("-")[0] for name in names] == kept
        list(made.decode(deque([Request(0, [1], 2)]), SamplerConfig(), seed=0))
        assert state.asked[-1][1]["model"] == names[-1]
    assert len({body["lora_path"] for path, body in state.asked if path == "/v1/load_lora_adapter"}) == 3
    assert not any("load_inplace" in body for _, body in state.asked)


def test_the_same_adapter_is_not_loaded_again(opened, start: str, tuned: Policy, tmp_path: Path) -> None:
    """Two processes push the same version to one server: its name contains its hash."""
    url, state = server(opened, start)
    folder = moved(tuned, tmp_path / "1", "adapter")
    for _ in range(2):
        engine(opened, tuned, url).load(folder, 1)
    assert sum(path == "/v1/load_lora_adapter" for path, _ in state.asked) == 1


def test_an_adapter_of_the_same_name_is_refused(opened, start: str, tuned: Policy, tmp_path: Path) -> None:
    """The server goes on with the first adapter that it loaded."""
    url, state = server(opened, start)
    made = engine(opened, tuned, url)
    made.load(moved(tuned, tmp_path / "1", "adapter"), 1)
    state.push = "first adapter"
    with pytest.raises(Refused, match="nothing arrived"):
        made.load(moved(tuned, tmp_path / "2", "adapter"), 2)


def test_an_adapter_on_another_model_is_refused(opened, start: str, tuned: Policy, tmp_path: Path) -> None:
    url, state = server(opened, start)
    for weight in state.base.values():
        weight.add_(torch.randn_like(weight) * 0.3)
    with pytest.raises(Refused, match="an adapter on another model than it is trained on"):
        engine(opened, tuned, url).load(moved(tuned, tmp_path / "1", "adapter"), 1)


def test_a_server_that_was_started_without_a_route_is_told_how(
    opened, start: str, tuned: Policy, tmp_path: Path
) -> None:
    url, state = server(opened, start)
    state.without = ("/v1/load_lora_adapter",)
    with pytest.raises(
        Refused, match="start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable"
    ):
        engine(opened, tuned, url).load(moved(tuned, tmp_path / "1", "adapter"), 1)
    state.without = ("/v1/completions",)
    with pytest.raises(Refused, match=r"set engine\.model to the server's name"):
        engine(opened, tuned, url).load(tmp_path / "1", 1)
    assert [path for path, _ in state.asked].count("/v1/load_lora_adapter") == 2  # not repeated


@pytest.mark.parametrize(("failing", "works"), [(1, True), (2, True), (3, False)])
def test_an_update_that_fails_is_repeated_twice(
    opened, start: str, tmp_path: Path, failing: int, works: bool
) -> None:
    policy, state, made = pushing(opened, start, push="transfer")
    state.failing_updates = failing
    folder = moved(policy, tmp_path / "1", "transfer")
    if works:
        made.load(folder, 1)
    else:
        with pytest.raises(Refused, match="/finish_weight_update failed 1 times, at last with status 500"):
            made.load(folder, 1)
    paths = [path for path, _ in state.asked]
    assert paths.count("/start_weight_update") == min(failing + 1, 3)
    assert paths.count("/pause?mode=keep") == paths.count("/resume")


def test_requests_go_to_the_least_busy_server(opened, start: str) -> None:
    servers = [server(opened, start) for _ in range(3)]
    policy = Policy.load(PolicyConfig(model=start))
    made = engine(opened, policy, *(url for url, _ in servers))
    done = list(made.decode(deque(Request(i, [1, 2], 3) for i in range(30)), SamplerConfig(batch=9), seed=0))
    assert sorted(d.request.number for d in done) == list(range(30))
    counts = [len(state.asked) for _, state in servers]
    assert sum(counts) == 30
    assert min(counts) >= 5


def test_a_server_that_dies_is_named_and_comes_back_after_its_probe(
    opened, start: str, tmp_path: Path
) -> None:
    (first, a), (second, b) = server(opened, start), server(opened, start)
    policy, said = Policy.load(PolicyConfig(model=start)), []
    made = engine(opened, policy, first, second, said=said)
    made.load(moved(policy, tmp_path / "1", "reload"), 1)
    assert said == []
    a.dead = True
    done = list(made.decode(deque(Request(i, [1, 2], 3) for i in range(12)), SamplerConfig(batch=4), seed=0))
    assert sorted(d.request.number for d in done) == list(range(12))
    assert made.measured["servers"] == 1
    assert list(made.measured["servers_dropped"]) == [first]
    assert len(said) == 1
    assert said[0].startswith(
        f"server {first} isn't used: {first}/v1/completions failed 2 times, at last with"
    )
    made.load(moved(policy, tmp_path / "2", "reload"), 2)  # still dead
    assert made.measured["servers"] == 1
    a.dead, a.push = False, "nothing"
    made.load(moved(policy, tmp_path / "3", "reload"), 3)  # runs again, without the weights
    assert made.measured["servers"] == 1
    assert "nats a token off" in made.measured["servers_dropped"][first]
    a.push = "right"
    made.load(moved(policy, tmp_path / "4", "reload"), 4)
    assert made.measured["servers"] == 2
    assert said[-1] == f"server {first} is used again: it passed its probe"
    before = len(a.asked)
    list(made.decode(deque(Request(i, [1, 2], 3) for i in range(12)), SamplerConfig(batch=4), seed=0))
    assert len(a.asked) > before
    a.dead = b.dead = True
    with pytest.raises(Refused, match="no server is left") as refused:
        list(made.decode(deque([Request(0, [1, 2], 3)]), SamplerConfig(), seed=0))
    assert first in str(refused.value)
    assert second in str(refused.value)


def restart(state: StandIn, start: str) -> None:
    """As a process that was killed in the middle of a request, and started again at once."""
    state.engine.policy.model.load_state_dict(Policy.load(PolicyConfig(model=start)).model.state_dict())
    state.adapters.clear()
    state.fail, state.how = 1, "hang up"


@pytest.mark.parametrize("way", ["reload", "adapter"])
def test_a_server_that_was_started_again_samples_only_after_a_push(
    opened, start: str, tmp_path: Path, way: str
) -> None:
    """It answers at once, with the weights that it started with: its log-probs are those of no version."""
    torch.manual_seed(0)
    (first, a), (second, b) = server(opened, start), server(opened, start)
    policy, said = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2) if way == "adapter" else None)), []
    made = engine(opened, policy, first, second, said=said, push=way)
    made.load(moved(policy, tmp_path / "1", way), 1)
    a.completions = b.completions = 0
    restart(a, start)
    done = list(made.decode(deque(Request(i, [1, 2], 3) for i in range(8)), SamplerConfig(batch=2), seed=0))
    assert len(done) == 8
    assert list(made.measured["servers_dropped"]) == [first]
    assert len(said) == 1
    assert a.completions + b.completions == 8
    restart(b, start)
    with pytest.raises(NoServer, match="no server is left"):
        list(made.decode(deque([Request(0, [1, 2], 3)]), SamplerConfig(), seed=0))
    assert made.version == -1
    made.load(tmp_path / "1", 1)
    assert made.measured["servers"] == 2
    assert made.version == 1


def test_a_connection_that_broke_between_is_proved_and_the_server_stays(
    opened, start: str, tmp_path: Path
) -> None:
    policy, state, made = pushing(opened, start, push="reload")
    made.load(moved(policy, tmp_path / "1", "reload"), 1)
    before = len(state.asked)
    state.fail, state.how = 1, "hang up"
    (done,) = made.decode(deque([Request(0, [1, 2], 3)]), SamplerConfig(), seed=0)
    assert done.version == 1
    paths = ["prompt_logprobs" in body for _, body in state.asked[before:]]
    assert paths == [False, True, True, True, True, False]  # the request, the probe's four, the request


def test_versions_of_tokens_are_stored_as_the_server_says_them(opened, start: str, tmp_path: Path) -> None:
    """From the third version on the stand-in says that each response began with the one before."""
    policy, _, made = pushing(opened, start, push="transfer", api="generate")
    made.load(moved(policy, tmp_path / "1", "transfer"), 1)
    rollout = Rollout(policy.encoder, made)
    assert {s.version for s in rollout.sample([Prompt("12>")], 4, SamplerConfig(max_new=6))} == {1}
    made.load(moved(policy, tmp_path / "2", "transfer"), 2)
    for s in rollout.sample([Prompt("12>")], 8, SamplerConfig(max_new=6)):
        sampled = int(s.action.sum())
        if sampled == 1:
            assert s.version == 2
            continue
        early = sampled // 2
        expected = [-1] * (len(s.tokens) - sampled) + [1] * early + [2] * (sampled - early)
        assert s.version.tolist() == expected
        assert s.oldest_version == 1


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("1", 0, 1)], r"over 3 tokens, got \[\(0, 1\)\]"),
        ([("1", 1, 3)], "weight_versions: expected spans one after the other"),
        ([("1", 0, 2), ("2", 1, 3)], "weight_versions"),
        ([("1", 0, 0), ("2", 0, 3)], "weight_versions"),
        ([], "weight_versions"),
        ([(1, 0, 3)], r"weight_versions\.0\.version: .*valid string"),
        ([("1", 0, "3")], r"weight_versions\.0\.end: .*valid integer"),
    ],
)
def test_wrong_spans_are_refused(opened, start: str, monkeypatch, spans, words: str) -> None:
    url, state = server(opened, start)
    policy = Policy.load(PolicyConfig(model=start))
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -1.0}] * 3},
        "finish_reason": "length",
        "weight_versions": [dict(zip(("version", "start", "end"), span)) for span in spans],
    }
    monkeypatch.setattr(state, "answer", lambda *_: {"choices": [choice]})
    made = engine(opened, policy, url, api="generate")
    with pytest.raises(Refused, match=words):
        list(made.decode(deque([Request(0, [1], 3)]), SamplerConfig(), 0))


def test_the_key_is_sent_and_comes_from_the_environment(opened, start: str, monkeypatch) -> None:
    url, state = server(opened, start)
    policy = Policy.load(PolicyConfig(model=start))
    with pytest.raises(Refused, match=r"engine\.api_key: expected AGRO_TEST_KEY in the environment"):
        engine(opened, policy, url, api_key="env:AGRO_TEST_KEY")
    monkeypatch.setenv("AGRO_TEST_KEY", "s3cret")
    made = engine(opened, policy, url, api_key="env:AGRO_TEST_KEY")
    list(made.decode(deque([Request(0, [1], 2)]), SamplerConfig(), 0))
    assert state.keys == ["Bearer s3cret"]


@pytest.mark.parametrize(
    "given", [{}, {"url": "http://a", "urls": ("http://b",)}, {"urls": ("http://a/", "http://a/v1")}]
)
def test_urls_are_given_once(given) -> None:
    with pytest.raises(Refused, match=r"engine\.urls?"):
        config.EngineConfig(kind="server", **given).servers  # noqa: B018


SGLANG = {
    "text": "12",
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 5, None], [-1.25, 6, None]],
        "input_token_logprobs": [[None, 1, None], [-2.0, 7, None], [-3.5, 9, None]],
        "weight_version": "default",
    },
}


@pytest.mark.parametrize("way", ["reload", "adapter"])
def test_sglang_gets_weights_is_probed_and_samples(
    opened, start: str, tuned: Policy, tmp_path: Path, way: str
) -> None:
    """With a stand-in of its routes, as its documentation says: no server was tried."""
    url, state = server(opened, start)
    policy = tuned if way == "adapter" else Policy.load(PolicyConfig(model=start))
    made = engine(opened, policy, url, dialect="sglang")
    for version in (1, 2):
        made.load(moved(policy, tmp_path / f"{version}", way), version)
        assert made.measured["push_error"] < ROUNDED
        [done] = made.decode(deque([Request(0, [1, 2], 4)]), SamplerConfig(), seed=0)
        ids = torch.tensor([1, 2, *done.tokens.tolist()])[None]
        with torch.no_grad():
            all_of = policy.model(input_ids=ids).logits.log_softmax(-1)
        expected = all_of[0, 1:-1].gather(1, ids[0, 2:, None])[:, 0].numpy()
        np.testing.assert_allclose(done.logp, expected, atol=ROUNDED)
    paths = [path for path, _ in state.asked]
    pushed = {"reload": "/update_weights_from_disk", "adapter": "/load_lora_adapter"}[way]
    assert paths.count(pushed) == 2
    assert paths.count("/flush_cache") == (2 if way == "reload" else 0)
    state.push = "nothing" if way == "reload" else "first adapter"
    with pytest.raises(Refused, match="nothing arrived"):
        made.load(moved(policy, tmp_path / "3", way), 3)


def test_sglang_is_asked_and_read_as_its_documentation_says() -> None:
    """No server was tried: the reply is written by hand after SGLang's documentation of /generate."""
    dialect = dialect_of(config.EngineConfig(kind="server", dialect="sglang"), [2])
    sampler = SamplerConfig(temperature=0.5, top_p=0.9, stop=("7",))
    body = dialect.sampling(Request(3, [1, 7], 4), sampler, 11, None)
    assert body["input_ids"] == [1, 7]
    assert body["return_logprob"] is True
    assert "lora_path" not in body
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "stop": ["7"],
        "no_stop_trim": True,
        "stop_token_ids": [2],
        "sampling_seed": 11 + 3 * 1_000_003,
    }
    assert dialect.sampling(Request(3, [1, 7], 4), sampler, 11, "agro@1")["lora_path"] == "agro@1"
    reply = dialect.read(SGLANG)
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ([5, 6], [-0.5, -1.25], "length")
    assert dialect.scoring([1, 7, 9], None)["logprob_start_len"] == 0
    assert dialect.scores(SGLANG, [1, 7, 9]) == [-2.0, -3.5]
    with pytest.raises(ValueError, match="input_token_logprobs"):
        dialect.scores(SGLANG, [1, 7, 8])
    for wrong in ([5.0, 6], ["5", 6], [True, 6]):
        with pytest.raises(ValidationError):
            dialect.read({**SGLANG, "output_ids": wrong})
    with pytest.raises(Failed, match="abort"):
        dialect.read({**SGLANG, "meta_info": {**SGLANG["meta_info"], "finish_reason": {"type": "abort"}}})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda choice: choice.pop("prompt_logprobs"), "prompt_logprobs: field required"),
        (lambda choice: choice["prompt_logprobs"].pop(), "log-probs of given tokens"),
        (lambda choice: choice["prompt_logprobs"].__setitem__(1, {"999": {"logprob": -1.0}}), "of token"),
        (lambda choice: choice["prompt_logprobs"].__setitem__(1, None), "of token"),
    ],
)
def test_a_server_that_does_not_score_is_refused(
    opened, start: str, tmp_path: Path, monkeypatch, spoil: Callable, words: str
) -> None:
    url, state = server(opened, start)
    answer = state.answer

    def spoiled(path, body):
        content = answer(path, body)
        if "prompt_logprobs" in body:
            spoil(content["choices"][0])
        return content

    monkeypatch.setattr(state, "answer", spoiled)
    policy = Policy.load(PolicyConfig(model=start))
    with pytest.raises(Refused, match=words):
        engine(opened, policy, url).load(moved(policy, tmp_path / "1", "reload"), 1)
