"""Episodes: what is recorded is what was sampled, and what each turn's policy said about it; how they end."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import PROMPTS, assert_same, by_index, check_behavior, windowed

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.logs.interchange import from_record
from agro.models.encoding import InvalidSample
from agro.rewards import check_failures, exact
from agro.rewards.builtin import ExactOptions
from agro.rollout import Rollout
from agro.rollout.engines import decoding_rows
from agro.rollout.engines.hf import HF
from agro.rollout.envs import Turn
from agro.rollout.evaluate import heldout
from agro.rollout.rollout import EpisodeReward
from agro.runs.side_by_side import response_parts
from agro.store import Store
from agro.store.copying import to_record
from agro.train.collate import collate
from agro.types import Prompt
from reproductions.calculator.run import demonstrate

EXACT = exact(ExactOptions())
TEMPLATE = (
    "{% for m in messages %}<bos>{{ 'b' if m.role == 'user' else 'a' }}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>a{% endif %}"
)
REWRITES = TEMPLATE.replace("else 'a' }}", "else 'a' if loop.last else 'h' }}")  # the role of earlier turns


class Echo:
    """Says back the last letter of a turn, `turns` times; then the episode is done."""

    name, stop = "echo", ("d",)

    def __init__(self, turns=2, reward=None, words="g{}g", role="user"):
        self.turns, self.reward, self.words, self.role = turns, reward, words, role

    def reset(self, prompt):
        return []

    def step(self, state, text):
        state.append(text)
        if len(state) > self.turns:
            return Turn(done=True, reward=self.reward)
        return Turn(self.words.format(text[-1:]), self.reward, info={"tool": "echo"}, role=self.role)


class Fails(Echo):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def reset(self, prompt):
        if self.where == "reset":
            raise KeyError("no such game")
        return []

    def step(self, state, text):
        if self.where == "step" and state:
            raise ZeroDivisionError("broken")
        return super().step(state, text) if self.where == "step" else self.where


def play(policy, environment, options=None, prompts=PROMPTS, n=6, max_turns=8, version=3):
    options = options or SamplerConfig(max_new=6)
    rollout = Rollout(policy.encoder, HF(policy, version), environment, max_turns)
    return sorted(rollout.sample(prompts, n, options, seed=5), key=lambda s: s.meta["index"])


def test_marks_stand_in_the_settings_of_episodes_too(tiny):
    policy = tiny()
    rollout = Rollout(policy.encoder, HF(policy), Echo(), 2, marks={"adapted": "props"})
    [sample] = rollout.sample(PROMPTS[:1], 1, SamplerConfig(max_new=2), seed=5)
    assert sample.sampling["adapted"] == "props"


def spans(sample):
    """Runs of actions and of what isn't, in order, after the prompt."""
    edges = np.flatnonzero(np.diff(sample.action.astype(int))) + 1
    return [part.tolist() for part in np.split(sample.tokens, edges)][1:]


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("batch", [64, 3])
def test_the_record_is_what_was_sampled(tiny, name, batch):
    policy = tiny(name, **windowed(name))
    found = play(policy, Echo(), SamplerConfig(max_new=6, batch=batch))
    assert [s.meta["index"] for s in found] == list(range(24))
    assert max(s.meta["turns"] for s in found) >= 2
    check_behavior(policy, found)
    for s in found:
        assert np.array_equal(np.isnan(s.behavior_logp), ~s.action)
        parts = spans(s)
        assert len(parts) == 2 * s.meta["turns"] - 1
        texts = [policy.encoder.decode(part) for part in parts]
        for turn, text, said in zip(parts[::2], texts[::2], parts[1::2]):
            assert turn[-1] == 2 or text.endswith("d")  # the end that was sampled is an action
            assert said == policy.encoder.ids(f"g{text[-1:]}g")
        assert (s.meta["last_turn"], s.response) == (texts[-1], "".join(texts))
        assert response_parts(s.response, s.meta.get("observations")) == texts
        assert s.tokens[0] == 1
        assert s.meta["tool_calls"] == min(s.meta["turns"], 2)
        assert (s.reward, s.episode, s.version, s.role) == (None, None, 3, "policy")
        assert policy.encode(s) == s
    assert collate(found, 3).mask.sum() == sum(s.action.sum() for s in found)


def test_an_episode_is_the_same_in_any_company(tiny, monkeypatch):
    monkeypatch.setattr(decoding_rows, "_SLACK", 1)  # columns are added and used up again and again
    policy = tiny()
    alone = play(policy, Echo(4), SamplerConfig(max_new=9, batch=1))
    assert max(s.meta["turns"] for s in alone) > 2
    for batch in (64, 7):
        others = play(policy, Echo(4), SamplerConfig(max_new=9, batch=batch))
        assert_same(by_index(others), by_index(alone))


def test_noise_goes_on_over_the_turns(tiny):
    """Every token equally likely: the turns are one long response with the same noise, cut at the stops."""
    policy = tiny()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    policy.eos_ids = ()
    policy.encoder = dataclasses.replace(policy.encoder, eos_ids=())
    plain = Rollout(policy.encoder, HF(policy))
    whole = by_index(plain.sample(PROMPTS, 6, SamplerConfig(max_new=24), seed=5))
    played = play(policy, Echo(3), SamplerConfig(max_new=24))
    for s in played:
        taken, one = s.tokens[s.action].tolist(), whole[s.meta["index"]]
        assert taken[:24] == one.tokens[one.action].tolist()[: len(taken)]
    assert sum(s.meta["turns"] > 1 for s in played) > 10


def test_one_turn_is_the_response_of_the_plain_sampler(tiny):
    policy = tiny()
    sampler = Rollout(policy.encoder, HF(policy, 3))
    plain = by_index(sampler.sample(PROMPTS, 6, SamplerConfig(max_new=6, stop=("d",)), seed=5))
    played = by_index(play(policy, Echo(0)))
    assert played.keys() == plain.keys()
    for i, a in plain.items():
        b = played[i]
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.behavior_logp.tobytes() == b.behavior_logp.tobytes()
        assert a.meta["finish"] == b.meta["finish"]


def test_an_episode_that_runs_out_ends_with_length(tiny):
    policy = tiny()
    endless = play(policy, Echo(99), max_turns=3)
    assert {(s.meta["turns"], s.meta["finish"]) for s in endless if s.meta["turns"] == 3} == {(3, "length")}
    full = [s for s in endless if len(spans(s)[-1]) == 6 and s.tokens[-1] != 2]
    cut = [s for s in full if not s.meta["last_turn"].endswith("d")]
    assert {s.meta["finish"] for s in cut} == {"length"}
    narrow = tiny(max_position_embeddings=20)
    found = play(narrow, Echo(99), prompts=[Prompt("a" * 14)], n=20)
    assert all(len(s.tokens) <= 20 and s.action[-1] and s.meta["finish"] == "length" for s in found)
    assert {1, 2} <= {s.meta["turns"] for s in found}
    with pytest.raises(Refused, match="leave no room"):
        play(narrow, Echo(), prompts=[Prompt("a" * 19)])


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("reset", r"environment echo: KeyError: 'no such game' \(test_turns.py:\d+\)"),
        ("step", "ZeroDivisionError: broken"),
        ("text", "step returned 'text', expected agro.rollout.envs.Turn"),
        (Turn(), "neither done nor gave an observation"),
        (Turn("a", float("nan")), "reward: expected a finite number or None, got nan"),
        (Turn(5), "observation: expected text"),
        (Turn("\ud800"), "UnicodeEncodeError"),
        (Turn("a", info={"x": object()}), "info"),
    ],
)
def test_what_fails_leaves_the_reward_unknown_and_the_tokens(tiny, where, error):
    policy = tiny()
    found = play(policy, Fails(where), SamplerConfig(max_new=40))
    failed = [s for s in found if "reward_error" in s.meta]
    assert failed
    check_behavior(policy, failed)
    assert {(s.reward, s.meta["finish"], s.knows_behavior) for s in failed} == {(None, "error", True)}
    assert max(s.meta["turns"] for s in found) == (2 if where == "step" else 1)
    scores = EpisodeReward(EXACT).score(failed)
    assert all(x.value is None for x in scores)
    with pytest.raises(Refused, match=error):
        check_failures(failed, scores, 0.5)


def test_rewards_of_the_environment_add_up_and_are_kept(tiny):
    found = play(tiny(), Echo(reward=0.25))
    assert {s.reward / s.meta["turns"] for s in found} == {0.25}
    assert [x.value for x in EpisodeReward(EXACT).score(found)] == [s.reward for s in found]


def test_a_reward_at_some_turns_only_is_unknown(tiny):
    class Late(Echo):
        def step(self, state, text):
            said = super().step(state, text)
            return Turn(done=True, reward=1.0) if said.done else said

    found = play(tiny(), Late(1))
    assert {s.reward for s in found if s.meta["turns"] == 1 and s.meta["finish"] == "length"} == {None}
    late = [s for s in found if s.meta["turns"] == 2]
    assert late
    ended = [s for s in late if s.meta["finish"] == "stop"]
    assert all("a reward at 1 of 2 turns" in s.meta["reward_error"] for s in ended)


def test_the_last_turn_is_scored(tiny):
    policy = tiny()
    (s,) = demonstrate(Echo(1), policy.encoder, Prompt("h", columns={"answer": "e"}), ["ad", "e"])
    seen = []

    class Watching:
        name = "watching"

        def score(self, samples):
            seen.extend(samples)
            return EXACT.score(samples)

        def close(self):
            pass

    (score,) = EpisodeReward(Watching()).score([s])
    assert (score.value, seen[0].response) == (1.0, "e")
    assert seen[0].meta["transcript"] == s.response == "adgdge"


def test_a_stop_text_of_the_configuration_is_cut_from_the_last_turn(tiny):
    policy = tiny()
    for s in play(policy, Echo(0), SamplerConfig(max_new=30, stop=("g",))):
        assert "g" not in s.meta["last_turn"]
        assert ("g" in s.response) == (s.response != s.meta["last_turn"])


def test_a_demonstration_is_encoded_as_the_policy_would_have_played_it(tiny):
    policy = tiny()
    (s,) = demonstrate(Echo(1), policy.encoder, Prompt("h"), ["ad", "be"], source="me")
    letters = {c: i + 4 for i, c in enumerate("abcdefgh ")}
    assert s.tokens.tolist() == [1, *(letters[c] for c in "hadgdgbe"), 2]  # <bos> … <eos>
    assert s.action.tolist() == [c == "a" for c in "ooaaoooaaa"]
    assert (s.role, s.source, s.behavior_logp, s.version) == ("expert", "me", None, -1)
    assert s.meta["finish"] == "stop"
    assert from_record(json.loads(json.dumps(to_record(s)))) == s


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (["ad"], "after the last turn"),
        (["ad", "b", "c"], "ended \\(stop\\) after 2 of 3"),
        (["xd"], "doesn't know"),
        ([], "after the last turn"),
        (["a" * 90 + "d", "b"], "ended \\(length\\) after 1 of 2"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_refused(tiny, turns, message):
    with pytest.raises(Refused, match=message):
        demonstrate(Echo(1), tiny().encoder, Prompt("h"), turns)


def test_turns_of_another_tokenizer_are_left_out(tiny):
    (s,) = demonstrate(Echo(1), tiny().encoder, Prompt("h"), ["ad", "be"])
    with pytest.raises(InvalidSample, match="tokens that the policy didn't choose") as error:
        tiny().encode(s.replace(tokenizer="another"))
    assert error.value.reason == "turns of another tokenizer"


@pytest.fixture
def chat(tiny, monkeypatch):
    """A function: chat template -> policy whose prompts are messages, in special tokens as in real ones."""

    def make(template):
        policy = tiny()
        monkeypatch.setattr(policy.tokenizer, "chat_template", template)
        monkeypatch.setattr(policy.tokenizer, "split_special_tokens", False)
        return policy

    return make


@pytest.mark.parametrize("template", [TEMPLATE, REWRITES])
def test_kept_sets_are_of_the_turns_of_the_policy(chat, template):
    """Those of its tokens, over which the trainer's log-probs are the recorded ones."""
    policy = chat(template)
    prompts = [Prompt([{"role": "user", "content": "ab"}])]
    found = play(policy, Echo(), SamplerConfig(max_new=6, top_p=0.7, keep_sets=True), prompts)
    assert max(s.meta["turns"] for s in found) >= 2
    assert any(s.episode is not None for s in found) is (template == REWRITES)
    tolerance = rounding(*(s.behavior_logp for s in found))
    for s in found:
        assert np.array_equal(s.kept_count > 0, s.action)
        batch = collate([s.replace(id=1)], 0, over_kept=True)
        with torch.no_grad():
            logp = policy.streams(batch.tokens, batch.lengths, batch.mask, kept=batch.kept)["logp"][0]
        np.testing.assert_allclose(s.behavior_logp, logp.numpy(), **tolerance)


def test_messages_go_on_in_the_chat_template(chat):
    policy, asked = chat(TEMPLATE), [{"role": "user", "content": "hh"}]
    (s,) = demonstrate(Echo(2), policy.encoder, Prompt(asked), ["ad", "be", "c"])
    said = [
        {"role": "assistant", "content": "ad"},
        {"role": "user", "content": "gdg"},
        {"role": "assistant", "content": "be"},
        {"role": "user", "content": "geg"},
    ]
    text = policy.encoder.render([*asked, *said]) + "c<eos>"
    assert s.tokens.tolist() == policy.encoder.ids(text)  # so the tokens are those of the whole conversation
    # "ad" ended with a stop text, so the template's end token is no action; "be" ended with its own.
    actions = [policy.tokenizer.decode(p) for p, mine in zip([*spans(s)], [True, False] * 3) if mine]
    assert actions == ["ad", "be<eos>", "c<eos>"]
    found = play(policy, Echo(), prompts=[Prompt(asked)], n=12)
    assert max(s.meta["turns"] for s in found) > 1
    check_behavior(policy, found)


def test_a_template_that_rewrites_history_makes_several_rows(chat, tmp_path):
    policy, asked = chat(REWRITES), [{"role": "user", "content": "hh"}]
    found = demonstrate(Echo(2), policy.encoder, Prompt(asked, columns={"answer": "c"}), ["ad", "be", "c"])
    shown = [policy.tokenizer.decode(s.tokens) for s in found]
    assert shown == [
        "<bos>bhh<eos><bos>aad",
        "<bos>bhh<eos><bos>had<eos><bos>bgdg<eos><bos>abe<eos>",
        "<bos>bhh<eos><bos>had<eos><bos>bgdg<eos><bos>hbe<eos><bos>bgeg<eos><bos>ac<eos>",
    ]
    assert [policy.tokenizer.decode(s.tokens[s.action]) for s in found] == ["ad", "be<eos>", "c<eos>"]
    assert len({s.episode for s in found}) == 1
    assert all(s.context_tokens.tolist() == s.tokens[~s.action].tolist() for s in found[1:])
    scores = EpisodeReward(EXACT).score(found)
    assert [x.value for x in scores] == [1.0] * 3
    batch = collate([s.replace(reward=1.0) for s in found], 0)
    assert batch.response.tolist() == [0, 0, 0]

    rollout = Rollout(policy.encoder, HF(policy), Echo(), 8)
    prompts = [Prompt(asked), Prompt([{"role": "user", "content": "b"}])]
    asked = [p.__class__(p.text, columns={"answer": "c"}) for p in prompts]
    held = heldout(rollout, EpisodeReward(EXACT), asked, SamplerConfig(n=6, max_new=6), seed=0)
    assert held.rewards.shape == (2, 6)
    assert len(held.samples) > 12
    with Store.open(tmp_path / "s.db") as store:
        store.append(s.replace(reward=0.0) for s in held.samples)
        assert [g.size for g in store.groups()] == [6, 6]


def test_a_role_that_the_template_does_not_show_is_refused(chat):
    policy = chat(TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}"))
    asked = [{"role": "user", "content": "h"}]
    with pytest.raises(Refused, match=r"message of role 'tool'.*doesn't show the content of message 2"):
        demonstrate(Echo(1, role="tool"), policy.encoder, Prompt(asked), ["ad", "b"])
