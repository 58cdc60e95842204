"""Conversations as tokens, under small templates modeled on well-known ones."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import transformers
from templated import bytes_model, layout_of, policy_under

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.rollout.envs import Turn
from agro.rollout.rollout import Transcript
from agro.types import UNKNOWN_VERSION, Prompt, Sample
from reproductions.calculator.run import demonstrate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
CHATML_HI = "<|im_start|>user\nhi<|im_end|>\n"
LLAMA3_HI = "<|im_start|>user<|im_start|>\n\nhi<|eot|>"
QWEN3 = (  # thinking stays after the last user's message only
    "{% set at = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if loop.index < at.user else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
R1 = (  # the generation prompt opens the thinking that is dropped of what was said
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
    "{% else %}A:{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:<think>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
PHI3 = (  # closes the whole where nothing is to follow
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% else %}<eos>{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDS = {QWEN3: "<|im_end|>", R1: "<eos>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot|>", "</s>"]

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def make(tmp_path_factory, causal):
    """A function: template, settings of [policy.chat] -> `Policy` over bytes and SPECIAL."""
    folder = bytes_model(tmp_path_factory.mktemp("bytes"))

    def policy(template: str | None = CHATML, /, **settings: Any) -> Policy:
        return policy_under(template, SPECIAL, folder, causal, 512, **settings)

    return policy


def layout(policy: Policy, sample: Sample) -> list[tuple[str, bool]]:
    return layout_of(policy, policy.encode(sample))


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def several(*turns: dict[str, Any], **meta: Any) -> Sample:
    return Sample([USER], turns[-1]["content"] or "", meta={"continuation": list(turns), **meta})


def test_messages_need_a_template_and_texts_stay_texts(make):
    bare = make(None)
    with pytest.raises(Refused, match="no chat template; give prompts as text"):
        bare.encoder.prompt([USER])
    assert layout(make(), Sample("hi", "yo")) == [("<bos>hi", False), ("yo<eos>", True)]


@pytest.mark.parametrize(
    ("template", "prompt", "end"),
    [
        (CHATML, f"{CHATML_HI}<|im_start|>assistant\n", "<|im_end|>"),
        (LLAMA3, f"<bos>{LLAMA3_HI}<|im_start|>assistant<|im_start|>\n\n", "<|eot|>"),
        (MISTRAL, "<bos>[INST] hi [/INST]", "</s>"),
        (PHI3, "<|im_start|>hi<|im_end|>\n<|im_start|>", "<|im_end|>"),
        (R1, "U:hiA:", "<eos>"),  # without a thought where the generation prompt opens one
        (BARE, "user: hi\nassistant: ", "<eos>"),  # a template that ends no turn: the tokenizer's EOS does
    ],
)
def test_the_generation_prompt_and_the_end_of_a_turn_are_the_templates(make, template, prompt, end):
    policy = make(template)
    space = " " if template == MISTRAL else ""  # which the template puts before a turn, and the model writes
    assert layout(policy, Sample([USER], "yo")) == [(prompt, False), (space + "yo" + end, True)]
    assert policy.tokenizer.convert_tokens_to_ids(end) in policy.eos_ids
    cut = Sample([USER], "yo", meta={"finish": "length"})
    opened = "<think>\n" if template == R1 else ""  # what was cut may be the thought
    assert layout(policy, cut) == [(prompt + opened, False), (space + "yo", True)]


def test_the_first_end_token_stays_the_tokenizers(make):
    """It closes plain texts."""
    policy = make()
    assert [policy.tokenizer.decode([i]) for i in policy.eos_ids] == ["<eos>", "<|im_end|>"]


def test_a_text_becomes_a_user_message_where_it_is_asked_for(make):
    policy = make(wrap=True, system="be short")
    system = "<|im_start|>system\nbe short<|im_end|>\n"
    assert layout(policy, Sample("hi", "yo")) == [
        (system + f"{CHATML_HI}<|im_start|>assistant\n", False),
        ("yo<|im_end|>", True),
    ]
    own = [{"role": "system", "content": "ramble"}, USER]
    assert "be short" not in layout(policy, Sample(own, "yo"))[0][0]
    (sampled,) = Rollout(policy.encoder, HF(policy)).sample([Prompt("hi")], 1, SamplerConfig(max_new=3))
    assert sampled.prompt == "hi"
    assert sampled.tokens[: -int(sampled.action.sum())].tolist() == policy.encoder.prompt([USER])
    assert policy.encode(sampled) is sampled


def test_options_reach_the_template(make):
    thinks, thinks_not = make(QWEN3), make(QWEN3, options={"enable_thinking": False})
    assert layout(thinks, Sample([USER], "yo"))[0][0].endswith("assistant\n")
    assert layout(thinks_not, Sample([USER], "yo"))[0][0].endswith("assistant\n<think></think>")


def test_a_template_from_a_file_is_saved_with_the_model(make, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    policy = make(BARE, template=str(tmp_path / "chat.jinja"))
    assert policy.fingerprint == make(CHATML).fingerprint != make(BARE).fingerprint
    policy.save(tmp_path / "model")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == CHATML


def test_settings_that_change_the_tokens_change_the_fingerprint(make):
    settings = [{}, {"wrap": True}, {"system": ""}, {"system": "s"}]
    settings += [{"options": {"enable_thinking": thinks}} for thinks in (False, True)]
    found = [make(QWEN3, **s).fingerprint for s in settings]
    assert len(set(found)) == len(settings)
    assert make(QWEN3, **settings[-1]).fingerprint == found[-1]


def test_default_settings_leave_the_fingerprint_of_stores_made_before(make):
    """The digest of tokenizer, special tokens and template alone."""
    tokenizer = make().tokenizer
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition.pop("truncation"), definition.pop("padding")
    text = json.dumps([definition, ["<bos>", "<eos>", "<unk>"], CHATML], sort_keys=True)
    assert make().fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, {"wrap": True}, "the tokenizer has no chat template"),
        (
            CHATML,
            {"options": {"enable_thinking": False}},
            r"policy.chat.options: enable_thinking: .* What to do: policy\.chat\.options=\{\}, ",
        ),
        (
            CHATML,
            {"options": {"add_generation_prompt": False}},
            "add_generation_prompt: .* agro sets this one",
        ),
        (CHATML, {"template": "/no/such.jinja"}, "/no/such.jinja: expected a file with a Jinja template"),
    ],
)
def test_settings_that_would_be_passed_over_are_refused(make, template, settings, message):
    with pytest.raises(Refused, match=message):
        make(template, **settings)


def test_a_text_under_settings_for_conversations_is_refused(make):
    said = r"policy\.chat\.system is for conversations.*set policy\.chat\.wrap = true"
    with pytest.raises(Refused, match=said):
        make(system="be short").encoder.prompt("hi")


def test_what_a_template_refuses_is_named(make):
    with pytest.raises(Refused, match="only user and assistant"):
        make(MISTRAL, system="be short").encoder.prompt([USER])
    with pytest.raises(Refused, match="the chat template fails"):
        make("{{ messages[0].nothing.more }}").encoder.prompt([USER])


def test_actions_of_several_turns_are_what_the_assistant_said(make):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": '{"at": "noon"}'}}],
    }
    sample = several(call, {"role": "tool", "content": "noon"}, answer("yo"), USER, answer("bye"))
    assert layout(make(), sample) == [
        (f"{CHATML_HI}<|im_start|>assistant\n", False),
        ('<call>clock {"at": "noon"}</call><|im_end|>', True),
        ("\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n", False),
        ("yo<|im_end|>", True),
        (f"\n{CHATML_HI}<|im_start|>assistant\n", False),
        ("bye<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA3, ["yo<|eot|>", f"{LLAMA3_HI}<|im_start|>assistant<|im_start|>\n\n", "bye<|eot|>"]),
        (MISTRAL, [" yo</s>", "[INST] hi [/INST]", " bye</s>"]),
        (PHI3, ["yo<|im_end|>", "\n<|im_start|>hi<|im_end|>\n<|im_start|>", "bye<|im_end|>"]),
        (BARE, ["yo", "\nuser: hi\nassistant: ", "bye<eos>"]),
        (QWEN3, ["yo<|im_end|>", f"\n{CHATML_HI}<|im_start|>assistant\n", "bye<|im_end|>"]),
    ],
)
def test_several_turns_under_other_templates(make, template, expected):
    found = layout(make(template), several(answer("yo"), USER, answer("bye")))
    assert [text for text, _ in found[1:]] == expected
    assert [own for _, own in found] == [False, True, False, True]


def test_the_mask_is_that_of_the_templates_own_marks(make):
    """transformers' mask of `{% generation %}` blocks."""
    policy = make(MARKED)
    turns = [answer("yo"), USER, answer("bye")]
    marked = policy.tokenizer.apply_chat_template(
        [USER, *turns], return_assistant_tokens_mask=True, return_dict=True
    )
    out = policy.encode(several(*turns))
    T = len(out.tokens)
    assert out.tokens.tolist() == marked["input_ids"][:T]
    assert out.action.tolist() == [bool(x) for x in marked["assistant_masks"][:T]]
    assert policy.tokenizer.decode(marked["input_ids"][T:]) == "\n"


def test_a_last_turn_that_was_cut_has_no_end_token(make):
    found = layout(make(), several(answer("yo"), USER, answer("bye"), finish="length"))
    assert found[-1] == ("bye", True)
    assert found[1] == ("yo<|im_end|>", True)


@pytest.mark.parametrize(
    ("template", "first"),
    [(QWEN3, "<think>\nhm\n</think>\n\nyo<|im_end|>"), (R1, "hm\n</think>\n\nyo<eos>")],
)
def test_a_template_that_drops_earlier_thoughts_makes_rows_of_one_episode(make, template, first):
    """As it does of a fresh episode."""
    policy = make(template)
    sample = several(answer("<think>\nhm\n</think>\n\nyo"), USER, answer("bye")).replace(id=7)
    rows = policy.encoder.rows(sample)
    assert [layout_of(policy, row)[-1][0] for row in rows] == [first, "bye" + first[-len(ENDS[template]) :]]
    assert [own for _, own in layout_of(policy, rows[1])] == [False, True]
    assert "hm" not in layout_of(policy, rows[1])[0][0]
    assert len({row.episode for row in rows}) == 1
    assert rows[0].episode is not None
    assert rows[0].context_tokens is None
    assert rows[1].context_tokens.tolist() == rows[1].tokens[~rows[1].action].tolist()
    with pytest.raises(InvalidSample, match="2 turns are separate sequences"):
        policy.encode(sample)


def test_turns_that_are_no_turns_are_refused(make):
    with pytest.raises(Refused, match=r"meta\.continuation: expected a list of messages"):
        make().encode(Sample([USER], "yo", meta={"continuation": [answer("yo"), USER]}))
    with pytest.raises(Refused, match=r"set policy\.chat\.wrap"):
        make().encode(Sample("hi", "yo", meta={"continuation": [answer("yo")]}))
    turns = {"continuation": [answer("yo"), USER, answer("bye")]}
    assert len(layout(make(wrap=True), Sample("hi", "bye", meta=turns))) == 4


def test_an_episode_that_begins_with_a_wrapped_text_is_a_conversation(make):
    policy = make(wrap=True, system="s")
    episode = Transcript(policy.encoder, Prompt("hi"), policy.encoder.prompt("hi"))
    episode.act([*policy.encoder.ids("yo"), policy.chat.end_id], None, UNKNOWN_VERSION)
    assert episode.observe("more", "user")
    (row,) = episode.rows
    assert policy.tokenizer.decode(row.tokens).count("<|im_start|>system\ns<|im_end|>") == 1
    assert policy.tokenizer.decode(row.tokens[row.context :]) == (
        "yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


class Says:
    """An environment that answers "hi" until it was answered twice."""

    name, stop = "says", ()

    def reset(self, prompt):
        return []

    def step(self, state, text):
        state.append(text)
        return Turn(done=True) if len(state) == 2 else Turn("hi", role="user")


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3, R1, MISTRAL, PHI3])
@pytest.mark.parametrize("first", ["yo", "<think>\nhm\n</think>\n\nyo"])
def test_a_log_has_the_tokens_of_a_fresh_episode(make, template, first):
    policy = make(template)
    if template == R1:
        first = first.removeprefix("<think>\n")  # which its generation prompt has
        if "</think>" not in first:
            pytest.skip("a fresh response without a thought goes on with the one that is opened")
    space = " " if template == MISTRAL else ""
    turns = [space + first, space + (first if template == R1 else "bye")]
    fresh = demonstrate(Says(), policy.encoder, Prompt([USER]), turns)
    logged = policy.encoder.rows(several(answer(first), USER, answer(turns[1].strip())))
    assert len(fresh) == len(logged)
    for a, b in zip(fresh, logged):
        assert policy.tokenizer.decode(a.tokens) == policy.tokenizer.decode(b.tokens)
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.action.tolist() == b.action.tolist()


def test_what_a_text_holds_of_its_own_tokens(make):
    policy = make()
    for response in ("yo<|im_end|>", "yo<|im_end|>\n", "yo<|im_end|><eos><eos>"):
        assert layout(policy, Sample([USER], response))[-1] == ("yo<|im_end|>", True)
    with pytest.raises(InvalidSample, match=r"special token <\|im_end\|> at character 2, and more text"):
        policy.encode(Sample([USER], "yo<|im_end|>\n<|im_start|>user\nhi"))
    assert layout(policy, Sample("<bos>hi", "yo<eos>"))[0] == ("<bos>hi", False)  # one BOS
    assert layout(policy, Sample("hi", "yo<eos>"))[-1] == ("yo<eos>", True)


def test_a_date_of_a_template_is_pinned(make):
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert layout(make(dated), Sample([USER], "yo"))[0][0].startswith("26 Jul 2024<|im_start|>user")
    later = make(dated, today="2025-01-02")
    assert layout(later, Sample([USER], "yo"))[0][0].startswith("02 Jan 2025<|im_start|>user")
    assert later.fingerprint != make(dated).fingerprint
    with pytest.raises(Refused, match="writes no date, so it has no effect"):
        make(CHATML, today="2025-01-02")
    with pytest.raises(Refused, match="expected a date such as 2026-01-31, got '2025-02-30'"):
        make(dated, today="2025-02-30")
    with pytest.raises(Refused, match="in a form that can't be pinned"):
        make("{% set f = '%Y' %}{{ strftime_now(f) }}" + CHATML).encoder.prompt([USER])


def test_what_is_not_shown_is_refused_or_dropped_where_asked(make):
    thought = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    with pytest.raises(InvalidSample, match=r"doesn't show its reasoning \('hm'\)") as caught:
        make().encode(several(thought))
    assert caught.value.reason == "reasoning that the chat template doesn't show"
    assert layout(make(CHATML, unshown="drop"), several(thought))[-1] == ("yo<|im_end|>", True)
    # a question is never left out
    with pytest.raises(Refused, match=r"the content of message 0 \(role user\)"):
        make("{% for m in messages %}{{ m.role }}{% endfor %}", unshown="drop").encoder.prompt([USER])
    silent = CHATML.replace(
        "{% if m.content %}{{ m.content }}{% endif %}", "{{ m.content if m.role != 'system' }}"
    )
    with pytest.raises(Refused, match=r"the content of message 0 \(role system\) \('be short'\)"):
        make(silent).encoder.prompt([{"role": "system", "content": "be short"}, USER])
    ahead = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    moves = ahead + CHATML.replace("in messages", "in messages if m.role != 'system'")
    make(moves).encoder.prompt([{"role": "system", "content": "be short"}, USER])
    with pytest.raises(Refused, match=r"message 1 \(role system\) in its place"):
        make(moves).encoder.prompt([USER, {"role": "system", "content": "be short"}])
