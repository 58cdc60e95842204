"""Real chat templates × kinds of content: each word arrives once and is learned where its author wrote it, or
the record is refused by name. The templates are those of TRL's wheel; nothing here names one of them. Texts
that follow others, with tokenizers that put a space before a text, as SentencePiece does.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from templated import bytes_model, layout_of, policy_under
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines import decoding_rows
from agro.rollout.engines.hf import HF
from agro.rollout.rollout import Transcript
from agro.types import Prompt, Sample

_SPEC = find_spec("trl")
FOLDER = Path(str(_SPEC.origin)).parent / "chat_templates" if _SPEC else Path("missing")
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja")) or [
    pytest.param("none", marks=pytest.mark.skip("trl isn't installed: pip install '.[trl]'"))
]
SPECIAL = re.compile(
    r"<\|[^|<>\s{}]+\|?>|<[^|<>\s{}]+\|>|<｜[^｜<>{}]+｜>|<(?:start|end)_of_turn>|</s>|\[/?INST\]|\[gMASK\]|<sop>"
)

REASONS = {
    *(f"{kind} that the chat template doesn't show" for kind in ("texts", "reasoning", "calls of tools")),
    *("declarations of tools that the chat template doesn't show", "the chat template fails"),
    "special tokens in a text",
}
ASK = {"role": "user", "content": "Question1"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup9",
        "description": "Description2",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
DATA = {"town": "Argument3", "days": 4, "deep": {"list": ["Argument5"]}}


def call(arguments: Any = DATA, name: str = "lookup9", id: str = "abcdefgh1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: Any = "Answer6", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TEXT = '{"town": "Argument3", "days": 4, "deep": {"list": ["Argument5"]}}'
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "Result7"}
CALLED = ["lookup9", "Argument3", "Argument5"]
Kind = tuple[list[dict[str, Any]], list[dict[str, Any]], list[str], list[str], str]


def kind(
    *turns: dict[str, Any],
    learned: str | list[str] = "Answer6",
    context: str = "Question1",
    finish: str = "stop",
    prompt: tuple[dict[str, Any], ...] = (ASK,),
) -> Kind:
    """Prompt, turns, what is learned in this order, what is context (words), and the reason of the end."""
    return [*prompt], [*turns], [learned] if isinstance(learned, str) else learned, context.split(), finish


THOUGHT, CALL = ["Thought9", "Answer6"], said(None, tool_calls=[call()])
SYSTEM = {"role": "system", "content": "System8"}
PART = {"role": "user", "content": [{"type": "text", "text": "Question1"}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
NEXT = {"role": "user", "content": "Question0"}
OTHER = call({"town": "Argument0"}, "other8", "abcdefgh2")
OLD = said(None, function_call={"name": "lookup9", "arguments": TEXT})
THINKING = [{"type": "thinking", "thinking": "Thought9"}, {"type": "text", "text": "Answer6"}]
KINDS: dict[str, Kind] = {
    "text": kind(said()),
    "system": kind(said(), prompt=(SYSTEM, ASK), context="System8 Question1"),
    "developer": kind(said(), prompt=({**SYSTEM, "role": "developer"}, ASK), context="System8"),
    "parts": kind(said([{"type": "output_text", "text": "Answer6"}]), prompt=(PART,)),
    "image": kind(said(), prompt=(IMAGE,), learned=[], context=""),
    "call": kind(CALL, learned=CALLED, finish="tool_calls"),
    "call as text": kind(said(None, tool_calls=[call(TEXT)]), learned=CALLED, finish="tool_calls"),
    "text and call": kind(said(tool_calls=[call()]), learned=["Answer6", *CALLED], finish="tool_calls"),
    "two calls": kind(
        said(None, tool_calls=[call(), OTHER]), learned=[*CALLED, "other8", "Argument0"], finish="tool_calls"
    ),
    "no arguments": kind(said(None, tool_calls=[call("")]), learned="lookup9", finish="tool_calls"),
    "old call": kind(OLD, learned=CALLED, context="", finish="function_call"),
    "result": kind(CALL, RESULT, said(), learned=[*CALLED, "Answer6"], context="Result7"),
    "result in the prompt": kind(
        said(), prompt=(ASK, said(None, tool_calls=[call(TEXT)]), RESULT), context="Argument3 Result7"
    ),
    "reasoning_content": kind(said(reasoning_content="Thought9"), learned=THOUGHT),
    "reasoning": kind(said(reasoning="Thought9"), learned=THOUGHT),
    "thinking": kind(said(thinking="Thought9"), learned=THOUGHT),
    "thinking part": kind(said(THINKING), learned=THOUGHT),
    "inline thought": kind(said("<think>\nThought9\n</think>\n\nAnswer6"), learned=THOUGHT),
    "half inline": kind(said("Thought9\n</think>\n\nAnswer6"), learned=THOUGHT),
    "cut thought": kind(said("<think>\nThought9 and"), learned="Thought9 and", finish="length"),
    "cut reasoning": kind(
        said("", reasoning_content="Thought9 and"), learned="Thought9 and", finish="length"
    ),
    "cut": kind(said("Answer6 and"), learned="Answer6 and", finish="length"),
    "reasoning and call": kind(
        said(None, reasoning_content="Thought9", tool_calls=[call()]),
        learned=["Thought9", *CALLED],
        finish="tool_calls",
    ),
    "tools": kind(said(), context="lookup9 Question1"),
    "tools and call": kind(CALL, learned=CALLED, context="Description2 Question1"),
    "empty": kind(said(""), learned=[]),
    "two turns": kind(said(), NEXT, said("Answer7"), learned=["Answer6", "Answer7"], context="Question0"),
    "two thoughts": kind(
        said(reasoning_content="Thought9"),
        NEXT,
        said("Answer7", reasoning_content="Thought8"),
        learned=["Thought9", "Answer6", "Thought8", "Answer7"],
        context="Question0",
    ),
    "spaces": kind(said("  Answer6 \n"), learned="  Answer6 \n"),
    "its own end": kind(said("Answer6{end}\n")),
    "another turn": kind(said("Answer6{end}\nQuestion0"), learned=[], context=""),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory, causal):
    """A function: template -> `Policy` over bytes and the special tokens of the template."""
    folder = bytes_model(tmp_path_factory.mktemp("bytes"))

    @functools.cache
    def policy(template: str) -> Policy:
        text = (FOLDER / f"{template}.jinja").read_text()
        return policy_under(text, sorted(set(SPECIAL.findall(text))), folder, causal, 65536)

    return policy


def rows_of(policy: Policy, kind: str) -> tuple[list[Sample], list[str], list[str], str]:
    prompt, turns, learned, context, finish = KINDS[kind]
    if "end" in kind or "another" in kind:
        end = policy.tokenizer.decode([policy.chat.end_id or policy.eos_ids[0]])
        turns = [{**turn, "content": turn["content"].format(end=end)} for turn in turns]
    text = Prompt(prompt, columns={"tools": [TOOL]} if "tools" in kind else {}).text
    sample = Sample(text, turns[-1]["content"] if isinstance(turns[-1]["content"], str) else "", 1.0)
    sample = sample.replace(meta={"continuation": turns, "finish": finish})
    return policy.encoder.rows(sample), learned, context, finish


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_words_arrive_once_or_the_record_is_refused_by_name(make, template, kind):
    policy = make(template)
    try:
        rows, learned, context, finish = rows_of(policy, kind)
    except InvalidSample as error:
        refusal = error.reason
    except Refused:
        refusal = "image"
    else:
        refusal = ""
    if refusal:
        assert refusal in REASONS if kind != "image" else refusal == "image"
        return
    assert kind not in ("image", "another turn")
    parts = [layout_of(policy, row) for row in rows]
    own = "\0".join(text for row in parts for text, chosen in row if chosen)
    other = [text for row in parts for text, chosen in row if not chosen]
    place = 0
    calls = ("lookup9", "other8", "Argument3", "Argument5")  # before or after text, arguments in any order
    for word in learned:
        assert own.count(word) == 1 or (own.count(word) == 2 and word in calls[:2]), (word, own)
    for word in (word for word in learned if word not in calls):
        assert own.index(word) >= place
        place = own.index(word)
    for word in ("Question1", "System8", "Result7", "Question0", "Description2"):
        assert word not in own
    for word in context:
        assert any(word in text for text in other), (word, other)
        counts = ["".join(t for t, c in row if not c).count(word) for row in parts]
        assert word in calls or max(counts) == 1
    if finish == "length":
        assert own.endswith(learned[-1])
        assert rows[-1].tokens[-1] not in policy.eos_ids
    else:
        assert all(row[-1][1] for row in parts)
        assert rows[-1].tokens[-1] in policy.eos_ids
    thoughts = re.findall(r"<think>\s*</think>", own)
    assert not thoughts, own


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_thought_as_the_model_writes_it_is_the_one_of_the_field(make, template):
    """With the template's own marks, such as the names of channels, which may be special tokens."""
    policy = make(template)
    style = policy.chat.template.thought
    if style is None or not style.field or not style.closing.strip():
        pytest.skip("the template shows no reasoning before text")
    opening = policy.encoder.render([ASK])
    begun = "" if policy.chat.template.opens_thought(opening) else style.opening
    end = policy.tokenizer.decode([policy.chat.end_id or policy.eos_ids[0]])
    raw = Sample([ASK], f"{begun}Thought9{style.closing}Answer6{end}")
    field = said(reasoning_content="Thought9")
    (expected,) = policy.encoder.rows(Sample([ASK], "Answer6", meta={"continuation": [field]}))
    (found,) = policy.encoder.rows(raw)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.action.tolist() == expected.action.tolist()


CHARACTERS = "0123456789=+.abc"
UNK_BOS_EOS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
STARTS = [f"▁{c}" for c in CHARACTERS]
MERGED = ["==", "4=", "ab"]
TOKENIZERS = [
    ("BPE", "legacy"),
    ("BPE", "first"),
    ("BPE", "always"),
    ("Unigram", "first"),
    ("Unigram", "always"),
]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}1{{ m.content }}={% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)


def sentencepiece(kind: str, scheme: str) -> Tokenizer:
    """A small tokenizer like Llama 2's ("legacy": its normalizer writes "▁" first), Mistral's or T5's."""
    pieces = [*UNK_BOS_EOS, *BYTES, "▁", *CHARACTERS, *STARTS, *MERGED]
    if kind == "Unigram":
        model = models.Unigram([(p, -2.0 if len(p) == 1 else -1.0) for p in pieces], 0, byte_fallback=True)
    else:
        merges = [tuple(pair) for pair in (*STARTS, *MERGED)]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    if scheme == "legacy":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "Unigram")
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def policy_with(causal, backend: Tokenizer) -> Policy:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    return Policy(causal("Llama", vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture(params=TOKENIZERS, ids=" ".join)
def policy(request, causal) -> Policy:
    return policy_with(causal, sentencepiece(*request.param))


def chosen(policy: Policy, sample: Sample) -> list[str]:
    encoded = policy.encode(sample)
    return policy.tokenizer.convert_ids_to_tokens(encoded.tokens[encoded.action].tolist())


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("2+2=", "4", ["4"]),
        ("2+2=", " 4", ["▁4"]),
        ("2+2=", "=4", ["=", "4"]),  # "==" is one token, but the prompt ends with "="
        ("2+2= ", "4", ["4"]),
        ("2+2=\n", "4", ["4"]),
        ("a", "b", ["b"]),
        ("2+2=", "4 4", ["4", "▁4"]),
        ("2+2=", "\n4", ["<0x0A>", "4"]),
        ("", "4", ["▁4"]),  # the start of a text
    ],
)
def test_a_response_has_the_tokens_of_a_continuation(policy, prompt, response, expected):
    sample = Sample(prompt, response)
    assert chosen(policy, sample) == [*expected, "</s>"]
    assert policy.encoder.decode(policy.encode(sample).tokens) == prompt + response


def test_later_turns_are_continuations_too(policy):
    roles = ("user", "assistant", "user", "assistant")
    first, *turns = [{"role": role, "content": text} for role, text in zip(roles, "3456", strict=True)]
    sample = Sample([first], "4", meta={"continuation": turns})
    assert chosen(policy, sample) == ["4", "</s>", "6", "</s>"]


@pytest.mark.parametrize("piece", ["4", "▁4"])
def test_the_text_of_a_sampled_response_tells_its_first_space(policy, piece, monkeypatch):
    """So another run that reads the text trains on the same tokens."""
    tokens = policy.tokenizer.convert_tokens_to_ids([piece, "a", "=", "</s>"])
    script = iter(tokens)
    rollout = Rollout(policy.encoder, HF(policy))
    monkeypatch.setattr(decoding_rows, "draw", lambda *args: (torch.tensor([next(script)]), torch.zeros(1)))
    (s,) = rollout.sample([Prompt("2+2=")], 1, SamplerConfig(max_new=8))
    assert s.response == piece.replace("▁", " ") + "a="
    assert policy.encode(Sample(s.prompt, s.response)).tokens.tolist() == s.tokens.tolist()


def test_a_stop_text_may_begin_with_the_space_of_a_response(policy, monkeypatch):
    script = iter(policy.tokenizer.convert_tokens_to_ids(["▁4", "a", "</s>"]))
    rollout = Rollout(policy.encoder, HF(policy))
    monkeypatch.setattr(decoding_rows, "draw", lambda *args: (torch.tensor([next(script)]), torch.zeros(1)))
    (s,) = rollout.sample([Prompt("2+2=")], 1, SamplerConfig(max_new=8, stop=(" 4",)))
    assert (s.response, int(s.action.sum()), s.meta["finish"]) == ("", 1, "stop")


def test_a_prefix_space_of_byte_level_tokens(causal):
    """GPT-2's tokenizers with add_prefix_space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*UNK_BOS_EOS, *alphabet, "Ġ4"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "4")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    policy = policy_with(causal, backend)
    assert chosen(policy, Sample("2+2=", "4")) == ["4", "</s>"]
    assert chosen(policy, Sample("2+2=", " 4")) == ["Ġ4", "</s>"]


def test_a_response_that_cannot_follow_without_a_space_is_counted(causal):
    """Words of a vocabulary are joined by spaces: no tokens spell "2+2=4"."""
    words = models.WordLevel({w: i for i, w in enumerate([*UNK_BOS_EOS, "2+2=", "4", "=", "."])}, "<unk>")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    policy = policy_with(causal, backend)
    assert chosen(policy, Sample("2+2=", " 4")) == ["4", "</s>"]
    sample = Sample("2+2=", "4")
    with pytest.raises(InvalidSample, match=sample.prompt_id) as caught:
        policy.encode(sample)
    assert caught.value.reason == "needs a space before it"


def test_observations_are_continuations_too(policy):
    known = policy.tokenizer
    transcript = Transcript(policy.encoder, Prompt("2+2="), policy.encoder.prompt("2+2="))
    for observation, expected in (("+1=", ["+", "1", "="]), (" 0", ["▁0"])):
        transcript.act(known.convert_tokens_to_ids(["4"]), None, 0)
        before = len(transcript.rows[0].tokens)
        assert transcript.observe(observation, "user")
        assert known.convert_ids_to_tokens(transcript.rows[0].tokens[before:]) == expected
