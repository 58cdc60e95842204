"""New weights on servers: each way to push them, what vLLM makes of some silently, and several servers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from stand_in import StandIn, decoded

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused
from agro.io.connection import Failed
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines import NoServer, Request
from agro.rollout.engines.connection import dialect_of
from agro.types import Prompt

ROUNDED = 1e-6  # nats a token: what float32 makes of log-probs of about 2


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_a_push_is_proved_and_its_error_is_rounding(bench, way: str) -> None:
    policy, state, made = bench.pushing(way)
    for version in (1, 2):
        made.load(bench.moved(policy, version, way), version)
        assert made.version == version
        assert made.measured["push_error"] < ROUNDED
        assert made.measured["servers"] == 1
    served = dict(state.engine.policy.model.named_parameters())
    for name, weight in policy.model.named_parameters():
        torch.testing.assert_close(served[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("way", "push"),
    [
        ("reload", "stale head"),
        ("reload", "half"),
        ("transfer", "half"),
        ("adapter", "first adapter"),  # the server goes on with that one
        ("reload", "nothing"),
        ("transfer", "nothing"),
    ],
)
def test_a_push_that_silently_fails_is_refused(bench, way: str, push: str) -> None:
    """The distance in the message is that of the log-probs before and after the push, computed here."""
    torch.manual_seed(0)
    policy, state, made = bench.pushing(way)
    made.load(bench.moved(policy, 1, way), 1)
    state.push = push
    with pytest.raises(Refused, match="--dtype as policy") as refused:
        made.load(bench.moved(policy, 2, way), 2)
    text = str(refused.value)
    off = of_probe(policy) - of_probe(state.engine.policy)
    assert f"{np.abs(off).mean():.3g} nats per token off" in text
    assert np.abs(off).mean() > 0.001
    assert made.hosts[0].url in text
    assert "engine.push_error = 0.001" in text
    assert made.version == 1


def logp_of(policy: Policy, ids: list[int]) -> np.ndarray:
    """[T-1] log-probs of all tokens but the first."""
    tokens = torch.tensor(ids)[None]
    with torch.no_grad():
        logp = policy.model(input_ids=tokens).logits.log_softmax(-1)
    return logp[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()


def of_probe(policy: Policy) -> np.ndarray:
    """Of the tokens of a probe, whose lengths the model's context of 16 limits."""
    random, size = np.random.default_rng(0), len(policy.tokenizer)
    return np.concatenate([logp_of(policy, random.integers(0, size, n).tolist()) for n in (5, 15, 15, 15)])


def test_a_server_of_another_dtype_is_named_and_may_be_allowed(bench) -> None:
    state = bench.server(bench.policy(dtype="bfloat16"))
    policy = bench.policy()
    with torch.no_grad():
        for weight in policy.weights().values():  # so that rounding shows in the logits
            weight.mul_(4)
    folder = bench.moved(policy, 1, "reload")
    with pytest.raises(Refused, match=r"--dtype as policy\.dtype.*engine\.push_error = 0\.05"):
        bench.engine(policy, state).load(folder, 1)
    made = bench.engine(policy, state, push_error=0.05)
    made.load(folder, 1)
    assert 0.001 < made.measured["push_error"] < 0.05


def test_the_bound_is_the_users(bench) -> None:
    state = bench.server()
    policy = bench.policy()
    state.push = "nothing"
    folder = bench.moved(policy, 1, "reload")
    for limit in (0.0, 9.0):
        made = bench.engine(policy, state, push_error=limit)
        made.load(folder, 1)
        assert made.measured["push_error"] > 0.001
    with pytest.raises(Refused, match=r"engine\.push_error"):
        bench.engine(policy, state).load(folder, 1)


def test_adapters_have_a_new_name_each_time_and_old_ones_are_unloaded(bench, tuned) -> None:
    """It finds out by itself that an adapter is pushed."""
    state = bench.server()
    made = bench.engine(tuned, state, model="model")
    for version, kept in ((1, ["agro@1"]), (2, ["agro@1", "agro@2"]), (3, ["agro@2", "agro@3"])):
        made.load(bench.moved(tuned, version, "adapter"), version)
        assert made.measured["push_error"] < ROUNDED
        names = list(state.adapters)
        assert [name.partition("-")[0] for name in names] == kept
        decoded(made)
        assert state.asked[-1][1]["model"] == names[-1]
    assert len({body["lora_path"] for path, body in state.asked if path == "/v1/load_lora_adapter"}) == 3
    assert not any("load_inplace" in body for _, body in state.asked)


def test_the_same_adapter_is_not_loaded_again(bench, tuned) -> None:
    """Two processes push the same version to one server: its name contains its hash."""
    state = bench.server()
    folder = bench.moved(tuned, 1, "adapter")
    for _ in range(2):
        bench.engine(tuned, state).load(folder, 1)
    assert sum(path == "/v1/load_lora_adapter" for path, _ in state.asked) == 1


def test_an_adapter_on_another_model_is_refused(bench, tuned) -> None:
    state = bench.server()
    for weight in state.base.values():
        weight.add_(torch.randn_like(weight) * 0.3)
    with pytest.raises(Refused, match="nats per token off"):
        bench.engine(tuned, state).load(bench.moved(tuned, 1, "adapter"), 1)


def test_a_server_that_was_started_without_a_route_is_told_how(bench, tuned) -> None:
    state = bench.server()
    state.without = ("/v1/load_lora_adapter",)
    words = "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable"
    with pytest.raises(Refused, match=words):
        bench.engine(tuned, state).load(bench.moved(tuned, 1, "adapter"), 1)
    state.without = ("/v1/completions",)
    with pytest.raises(Refused, match=r"set engine\.model to the server's name"):
        bench.engine(tuned, state).load(bench.folder / "1", 1)
    assert [path for path, _ in state.asked].count("/v1/load_lora_adapter") == 2  # not repeated


@pytest.mark.parametrize(("failing", "works"), [(1, True), (2, True), (3, False)])
def test_an_update_that_fails_is_repeated_twice(bench, failing: int, works: bool) -> None:
    policy, state, made = bench.pushing("transfer")
    state.failing_updates = failing
    folder = bench.moved(policy, 1, "transfer")
    if works:
        made.load(folder, 1)
    else:
        with pytest.raises(Refused, match="/finish_weight_update failed with status 500"):
            made.load(folder, 1)
    paths = [path for path, _ in state.asked]
    assert paths.count("/start_weight_update") == min(failing + 1, 3)
    assert paths.count("/pause?mode=keep") == paths.count("/resume")


def test_requests_go_to_the_least_busy_server(bench) -> None:
    servers = [bench.server() for _ in range(3)]
    made = bench.engine(bench.policy(), *servers)
    done = decoded(made, 30, batch=9)
    assert sorted(d.request.number for d in done) == list(range(30))
    counts = [len(state.asked) for state in servers]
    assert sum(counts) == 30
    assert min(counts) >= 5


def test_a_server_that_dies_is_named_and_comes_back_after_its_probe(bench) -> None:
    policy, a, b, said = bench.policy(), bench.server(), bench.server(), bench.said
    made = bench.engine(policy, a, b)
    made.load(bench.moved(policy, 1, "reload"), 1)
    assert said == []
    a.dead = True
    done = decoded(made, 12, batch=4)
    assert sorted(d.request.number for d in done) == list(range(12))
    assert made.measured["servers"] == 1
    assert list(made.measured["servers_dropped"]) == [a.url]
    assert len(said) == 1
    failed = f"server {a.url} isn't used: {a.url}/v1/completions failed 2 times, finally with"
    assert said[0].startswith(failed)
    made.load(bench.moved(policy, 2, "reload"), 2)  # still dead
    assert made.measured["servers"] == 1
    a.dead, a.push = False, "nothing"
    made.load(bench.moved(policy, 3, "reload"), 3)  # runs again, without the weights
    assert made.measured["servers"] == 1
    assert "nats per token off" in made.measured["servers_dropped"][a.url]
    a.push = "right"
    made.load(bench.moved(policy, 4, "reload"), 4)
    assert made.measured["servers"] == 2
    assert said[-1] == f"server {a.url} is used again: it passed its probe"
    before = len(a.asked)
    decoded(made, 12, batch=4)
    assert len(a.asked) > before
    a.dead = b.dead = True
    with pytest.raises(Refused, match="no server is left") as refused:
        decoded(made)
    assert all(url in str(refused.value) for url in (a.url, b.url))


def restart(state: StandIn, start: Policy) -> None:
    """As a process that was killed in the middle of a request, and started again at once."""
    state.engine.policy.model.load_state_dict(start.model.state_dict())
    state.adapters.clear()
    state.fail, state.how = 1, "hang up"


@pytest.mark.parametrize("way", ["reload", "adapter"])
def test_a_server_that_was_started_again_samples_only_after_a_push(bench, tuned, way: str) -> None:
    """It answers at once, with the weights that it started with: its log-probs are those of no version."""
    torch.manual_seed(0)
    a, b, policy = bench.server(), bench.server(), tuned if way == "adapter" else bench.policy()
    made = bench.engine(policy, a, b, push=way)
    made.load(bench.moved(policy, 1, way), 1)
    a.completions = b.completions = 0
    restart(a, bench.policy())
    done = decoded(made, 8, batch=2)
    assert len(done) == 8
    assert list(made.measured["servers_dropped"]) == [a.url]
    assert len(bench.said) == 1
    assert a.completions + b.completions == 8
    restart(b, bench.policy())
    with pytest.raises(NoServer, match="no server is left"):
        decoded(made)
    assert made.version == -1
    made.load(bench.folder / "1", 1)
    assert made.measured["servers"] == 2
    assert made.version == 1


def test_a_connection_that_broke_between_is_proved_and_the_server_stays(bench) -> None:
    policy, state, made = bench.pushing("reload")
    made.load(bench.moved(policy, 1, "reload"), 1)
    before = len(state.asked)
    state.fail, state.how = 1, "hang up"
    [done] = decoded(made)
    assert done.version == 1
    paths = ["prompt_logprobs" in body for _, body in state.asked[before:]]
    assert paths == [False, True, True, True, True, False]  # the request, the probe's four, the request


def test_versions_of_tokens_are_stored_as_the_server_says_them(bench) -> None:
    """From the third version on the stand-in says that each response began with the one before."""
    policy, _, made = bench.pushing("transfer", api="generate")
    made.load(bench.moved(policy, 1, "transfer"), 1)
    rollout = Rollout(policy.encoder, made)
    assert {s.version for s in rollout.sample([Prompt("12>")], 4, SamplerConfig(max_new=6))} == {1}
    made.load(bench.moved(policy, 2, "transfer"), 2)
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
        ([("1", 1, 3)], "weight_versions: expected contiguous spans over"),
        ([("1", 0, 2), ("2", 1, 3)], "weight_versions"),
        ([("1", 0, 0), ("2", 0, 3)], "weight_versions"),
        ([], "weight_versions"),
        ([(1, 0, 3)], r"weight_versions\.0\.version: .*valid string"),
        ([("1", 0, "3")], r"weight_versions\.0\.end: .*valid integer"),
    ],
)
def test_wrong_spans_are_refused(bench, monkeypatch, spans, words: str) -> None:
    state = bench.server()
    policy = bench.policy()
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -1.0}] * 3},
        "finish_reason": "length",
        "weight_versions": [dict(zip(("version", "start", "end"), span)) for span in spans],
    }
    monkeypatch.setattr(state, "answer", lambda *_: {"choices": [choice]})
    made = bench.engine(policy, state, api="generate")
    with pytest.raises(Refused, match=words):
        decoded(made)


def test_the_key_is_sent_and_comes_from_the_environment(bench, monkeypatch) -> None:
    state = bench.server()
    policy = bench.policy()
    with pytest.raises(Refused, match=r"engine\.api_key: expected AGRO_TEST_KEY in the environment"):
        bench.engine(policy, state, api_key="env:AGRO_TEST_KEY")
    monkeypatch.setenv("AGRO_TEST_KEY", "s3cret")
    made = bench.engine(policy, state, api_key="env:AGRO_TEST_KEY")
    decoded(made)
    assert state.keys == ["Bearer s3cret"]


@pytest.mark.parametrize("urls", [(), ("http://a/", "http://a/v1")])
def test_urls_are_given_once(urls) -> None:
    with pytest.raises(Refused, match=r"engine\.urls"):
        config.EngineConfig(kind="server", urls=urls).servers  # noqa: B018


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
def test_sglang_gets_weights_is_probed_and_samples(bench, tuned, way: str) -> None:
    """With a stand-in of its routes, as its documentation says: no server was tried."""
    state = bench.server()
    policy = tuned if way == "adapter" else bench.policy()
    made = bench.engine(policy, state, dialect="sglang")
    for version in (1, 2):
        made.load(bench.moved(policy, version, way), version)
        assert made.measured["push_error"] < ROUNDED
        [done] = decoded(made, room=4)
        expected = logp_of(policy, [1, 2, *done.tokens.tolist()])[1:]
        np.testing.assert_allclose(done.logp, expected, atol=ROUNDED)
    paths = [path for path, _ in state.asked]
    pushed = {"reload": "/update_weights_from_disk", "adapter": "/load_lora_adapter"}[way]
    assert paths.count(pushed) == 2
    assert paths.count("/flush_cache") == (2 if way == "reload" else 0)
    state.push = "nothing" if way == "reload" else "first adapter"
    with pytest.raises(Refused, match="nats per token off"):
        made.load(bench.moved(policy, 3, way), 3)


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
        with pytest.raises(ValidationError, match=r"output_ids\.0\n  Input should be a valid integer"):
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
def test_a_server_that_does_not_score_is_refused(bench, monkeypatch, spoil: Callable, words: str) -> None:
    policy, state, made = bench.pushing("reload")
    answer = state.answer

    def spoiled(path, body):
        content = answer(path, body)
        if "prompt_logprobs" in body:
            spoil(content["choices"][0])
        return content

    monkeypatch.setattr(state, "answer", spoiled)
    with pytest.raises(Refused, match=words):
        made.load(bench.moved(policy, 1, "reload"), 1)
