"""Published sets of judged responses: dialogues (HH-RLHF, HelpSteer), Chatbot Arena's conversations of two
models and which one its user prefers, and sets that are a declaration of their columns."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.logs.declared import Columns, Parser
from agro.logs.fields import assistant, exchange, integer, listed, number, parsed, plain, total, user
from agro.logs.protocol import TIE, Context, Item, Row, Votes
from agro_formats.judgments import PairColumns, Ranking

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_STEERED = ("prompt", "context", "response1", "response2", "response_1", "response_2")


def is_hh(row: Row) -> bool:
    texts = (row.get("chosen"), row.get("rejected"), row.get("prompt", row.get("chosen")))
    return all(isinstance(x, str) for x in texts) and bool(_TURN.match(texts[2] or ""))


def read_hh(row: Row, context: Context) -> list[Item]:
    """Complete dialogues; or only the last turns, where the dialogue before them is in `prompt`."""
    prefix = row.get("prompt") or ""
    chosen, rejected = (_dialogue(prefix + text(row[n], n), n) for n in ("chosen", "rejected"))
    if rejected[:-1] != chosen[:-1]:
        raise Refused("rejected: expected the turns of chosen, and then another response")
    meta = omit(row, ("prompt", "chosen", "rejected", "response"))
    if row.get("response") not in (None, row["chosen"]):
        meta["response"] = row["response"]
    better, worse = (
        {"prompt": chosen[:-1], "response": turns[-1]["content"], "meta": meta}
        for turns in (chosen, rejected)
    )
    return [Item.pair(better, worse)]


def open_dialogue(value: Any, name: str) -> list[dict[str, Any]]:
    """The turns of a dialogue that ends where the assistant's next response begins."""
    transcript = text(value, name)
    turns = _dialogue(transcript, name)
    if turns[-1]["content"]:
        raise Refused(f"{name}: expected '\\n\\nAssistant:' at its end, got {transcript[-80:]!r}")
    return turns[:-1]


def _dialogue(transcript: str, name: str) -> list[dict[str, Any]]:
    preamble, *parts = _TURN.split(transcript)
    turns = [
        user(content.strip()) if speaker == "Human" else assistant(content.strip())
        for speaker, content in zip(parts[::2], parts[1::2])
    ]
    if preamble.strip() or len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise Refused(
            f"{name}: expected turns that begin with '\\n\\nHuman:' or '\\n\\nAssistant:', the last one the "
            f"assistant's, got {transcript!r:.80}"
        )
    return turns


def _attributes(row: Row, context: Context) -> float | None:
    columns = [name for name in _ATTRIBUTES if name in row]
    if context.is_text:
        row = {**row, **{name: parsed(row[name], name) for name in columns if row[name] is not None}}
    return total(row, columns, context.rewards)


HELPSTEER = Columns("prompt", "response", judge=_attributes)


def read_helpsteer(row: Row, context: Context) -> list[Item]:
    """The preference is of -3 (the first response is much better) to 3 (the second is); 0 is a tie.

    Votes are how many annotators prefer each, where they are there; no difference counts half for each. They
    are equal where the preference of all is 0, also where more of them prefer one.
    """
    strength = "overall_preference" if "overall_preference" in row else "preference_strength"
    preference = integer(row[strength], strength)
    if not -3 <= preference <= 3:
        raise Refused(f"{strength}: expected an integer from -3 to 3, got {preference}")
    names = [name for name in _STEERED if name in row and name.startswith("response")]
    prompt = objects(row["context"], "context") if "context" in row else text(row["prompt"], "prompt")
    meta = omit(row, _STEERED)
    records = [{"prompt": prompt, "response": text(row[name], name), "meta": meta} for name in names]
    judged = listed(row.get("individual_preference"), "individual_preference")
    scores = [number(one.get("score"), f"individual_preference[{i}].score") for i, one in enumerate(judged)]
    numbers = [score for score in scores if score is not None]
    votes: Votes = TIE if preference == 0 else (None, None)
    if numbers and preference == 0:
        votes = (len(numbers) / 2, len(numbers) / 2)
    elif numbers:
        ties = sum(score == 0 for score in numbers) / 2
        votes = (sum(score < 0 for score in numbers) + ties, sum(score > 0 for score in numbers) + ties)
    if preference > 0:
        return [Item.pair(records[1], records[0], (votes[1], votes[0]))]
    return [Item.pair(records[0], records[1], votes)]


_SIDES = ("conversation_a", "conversation_b")
_TEXTS = ("prompt", "response_a", "response_b")
_FLAGS = {"winner_model_a": "model_a", "winner_model_b": "model_b", "winner_tie": "tie"}
_BOTH_BAD = ("both_bad", "bothbad", "tie (bothbad)")


def read_conversations(row: Row, context: Context) -> list[Item]:
    sides = [
        [
            {"role": turn.get("role"), "content": plain(turn.get("content"), f"{name}[{i}].content")}
            for i, turn in enumerate(objects(unpacked(row[name]), name))
        ]
        for name in _SIDES
    ]
    winner = row["winner"]
    if winner not in (*_FLAGS.values(), *_BOTH_BAD):
        raise Refused(f"winner: expected model_a, model_b, tie or both_bad, got {winner!r:.80}")
    return _judged(sides, winner, omit(row, (*_SIDES, "model_a", "model_b")), row, context)


def read_texts(row: Row, context: Context) -> list[Item]:
    prompts, a, b = (_list(row[name], name) for name in _TEXTS)
    won = [winner for flag, winner in _FLAGS.items() if integer(row[flag], flag)]
    if len(won) != 1:
        raise Refused(f"winner: expected one of {', '.join(_FLAGS)} to be 1, got {len(won)}")
    if not len(prompts) == len(a) == len(b):
        raise Refused(
            f"prompt: expected as many turns as the responses have, got {len(prompts)}, {len(a)} and {len(b)}"
        )
    sides = [
        list(chain.from_iterable(zip(map(user, prompts), map(assistant, replies)))) for replies in (a, b)
    ]
    return _judged(sides, won[0], omit(row, (*_TEXTS, "model_a", "model_b")), row, context)


def _list(value: Any, name: str) -> list[str]:
    turns = unpacked(value)
    if isinstance(turns, str):
        return [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise Refused(f"{name}: expected a list of texts, one a turn, got {value!r:.80}")
    return turns


def _judged(
    sides: list[list[dict[str, Any]]], winner: str, meta: dict[str, Any], row: Row, context: Context
) -> list[Item]:
    """A pair; of a tie with one vote for each. Where both are bad there is none: --choose both_bad=zero gives
    both the reward 0."""
    prompts = [list(takewhile(lambda turn: turn["role"] != "assistant", turns)) for turns in sides]
    if not prompts[0] or prompts[0] != prompts[1]:
        raise Refused("conversation_b: expected the messages before the first response of conversation_a")
    records = []
    for turns, name, model in zip(sides, _SIDES, ("model_a", "model_b")):
        record = exchange(prompts[0], turns[len(prompts[0]) :], ("prompt", name))
        record["meta"] = record.get("meta", {}) | meta | {"winner": winner}
        records.append(record | {"model": row.get(model)})
    if winner == "tie":
        return [Item.pair(records[0], records[1], TIE)]
    if winner in _BOTH_BAD:
        choice = context.choose.get("both_bad", "none")
        if choice not in ("none", "zero"):
            raise Refused(f"--choose both_bad={choice}: expected none, or zero for a reward of 0")
        reward = 0.0 if choice == "zero" else None
        return [Item.of(record | {"reward": reward}, name) for record, name in zip(records, _SIDES)]
    better, worse = (0, 1) if winner == "model_a" else (1, 0)
    return [Item.pair(records[better], records[worse])]


def _post(value: Any, name: str) -> str:
    """What is to be summarized, as the set's own policies were asked: a post of Reddit, or an article."""
    info = entry(value, name)
    if info.get("article") is not None:
        return f"Article:\n{text(info['article'], f'{name}.article')}\n\nTL;DR:\n"
    subreddit, title, post = (text(info.get(key), f"{name}.{key}") for key in ("subreddit", "title", "post"))
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


PARSERS: dict[str, Parser] = {"dialogue": open_dialogue, "post": _post}
SHAPES: dict[str, Callable[..., PairColumns | Ranking | Columns]] = {
    "pair": PairColumns,
    "ranking": Ranking,
    "columns": Columns,
}


DECLARED: dict[str, dict[str, Any]] = {}
for _name, _fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
    _values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in _fields.items()
    }
    _parse = {"parse": PARSERS[_values.pop("parse")]} if "parse" in _values else {}
    _set = SHAPES[_values.pop("shape")](**_values, **_parse)
    DECLARED[_name] = {"read": _set.read, "fits": _set.fits}
