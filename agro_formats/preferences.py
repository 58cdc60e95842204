"""Read published sets of judged responses: dialogues (HH-RLHF, HelpSteer); Chatbot Arena's conversations with
two models and the preferred one; UltraFeedback, four rated responses per instruction, and pairs made of them;
OpenAssistant's trees of messages, and their table; ranked responses (Nectar); and the sets whose columns are
declared in `preferences.toml`, with scores, with votes, or with the name of the better response.

Paths in a declaration are as in `--map`: the name of a column, or a JMESPath expression.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, objects, omit, text, unpacked
from agro.io.jsonlines import Line
from agro.logs.mapping import Columns, at, heads
from agro.logs.protocol import TIE, Context, Item, Judgment, Row, SkipRecord, Votes
from agro.logs.records import TURN, Record, assistant, exchange, system, until_reply, user
from agro.logs.values import integer, listed, number, one_of, total, wrong
from agro.types.conversation import normalized


def read_nectar(row: Row, context: Context) -> list[Item]:
    """Read ranked responses; the lowest rank is the best. `--reward rank=-1` makes the rank a reward."""
    *prompt, final_turn = _dialogue(text(row["prompt"], "prompt"), "prompt")
    if final_turn["content"]:
        raise Refused(f"prompt: expected '\\n\\nAssistant:' at its end, got {row['prompt'][-80:]!r}")
    meta = omit(row, ("prompt", "answers"))
    records = dict[str, Record]()
    ranks = list[float | None]()
    for i, answer in enumerate(objects(row["answers"], "answers")):
        name = f"answers[{i}]"
        ranks.append(number(answer.get("rank"), f"{name}.rank"))
        records[name] = {
            "prompt": prompt,
            "response": text(answer.get("answer"), f"{name}.answer"),
            "model": answer.get("model"),
            "meta": meta | omit(answer, ("answer", "model")),
        }
        if context.rewards:
            records[name]["reward"] = total({"rank": ranks[-1]}, ("rank",), context.rewards)
    return [Item(tuple(records.values()), tuple(records), rank_judgments(ranks))]


@dataclass(frozen=True)
class PairColumns:
    """The columns of two responses, and of which is better. `{}` in a path stands for the name of a side."""

    prompt: str
    response: str
    sides: tuple[str, str] = ("0", "1")
    better: Mapping[str, str] = field(default_factory=dict)
    """The columns that name the better side, by preference; --choose preference selects one of several."""
    values: tuple[int, int] = (0, 1)  # the values of such a column for the two sides
    score: str = ""  # without `better`, the side with the higher score is better
    votes: str = ""
    model: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)  # paths by their names in `meta`
    compose: Callable[[Row], Any] | None = None  # makes the prompt from several columns
    columns: tuple[str, ...] = ()  # further columns that every record has

    def fits(self, row: Row) -> bool:
        """Whether a record has these columns."""
        paths = (self.prompt, *self._both(self.response))
        return row.keys() >= {*self.columns, *heads(paths)}

    def read(self, row: Row, context: Context) -> list[Item]:
        names = self._both(self.response)
        paths = [path for each in (self.model, *self.meta.values()) for path in self._both(each)]
        dropped, records = heads((*names, *paths)), []
        for side, name in zip(self.sides, names):
            meta = {key: path.replace("{}", side) for key, path in self.meta.items()}
            model = self.model.replace("{}", side)
            one = Columns(self.prompt, name, model, meta=meta, dropped=dropped, compose=self.compose)
            records.append(one.record(row, context))
        return [Item(tuple(records), names, self._judgments(row, context))]

    def _judgments(self, row: Row, context: Context) -> tuple[Judgment, ...]:
        """The judgment of a record; equal votes, or without votes equal scores, are a tie. Votes below 0 are
        unknown."""
        paths = self._both(self.votes or self.score)
        a, b = (number(at(row, path), path, is_text=context.is_text) for path in paths)
        if self.votes and min(a or 0, b or 0) < 0:
            a = b = None
        if a is not None and a == b:
            return (Judgment(0, 1, (a, b) if self.votes else TIE),)
        if self.better:
            winner = self._winner(row, context)
        else:
            winner = None if a is None or b is None else int(b > a)
        if winner is None:
            return ()
        won, lost = (a, b) if winner == 0 else (b, a)
        if self.votes and won is not None and lost is not None and won < lost:
            better, worse = (self._both(self.votes)[side] for side in (winner, 1 - winner))
            raise Refused(
                f"{better}: expected more than {worse}, as that side is better, got {won} and {lost}"
            )
        return (Judgment(winner, 1 - winner, (won, lost) if self.votes else (None, None)),)

    def _winner(self, row: Row, context: Context) -> int | None:
        """The side that the column of `better` names; None if it is unknown."""
        column = self.better[context.chosen("preference", (n for n, c in self.better.items() if c in row))]
        if is_unknown(row[column]):
            return None
        value = integer(row[column], column)
        if value not in self.values:
            says = ", ".join(f"{v} for {name}" for v, name in zip(self.values, self._both(self.response)))
            raise wrong(column, says, value)
        return self.values.index(value)

    def _both(self, path: str) -> tuple[str, str]:
        a, b = (path.replace("{}", side) for side in self.sides)
        return a, b


def rank_judgments(ranks: Sequence[float | None]) -> tuple[Judgment, ...]:
    """Judge every two responses with a rank: the lower rank is better, and equal ranks are a tie."""
    ranked = [(i, rank) for i, rank in enumerate(ranks) if rank is not None]
    return tuple(
        Judgment(i, j, TIE) if a == b else Judgment(i, j) if a < b else Judgment(j, i)
        for (i, a), (j, b) in combinations(ranked, 2)
    )


def tally(judgments: Iterable[Judgment]) -> tuple[Judgment, ...]:
    """Combine the judgments of several annotators into one per pair of responses, with the votes for each.

    A tie is half a vote for each response.
    """
    votes: dict[tuple[int, int], list[float]] = {}
    for judgment in judgments:
        pair = (min(judgment[:2]), max(judgment[:2]))
        counts = votes.setdefault(pair, [0.0, 0.0])
        for side in (0, 1):
            counts[side] += 0.5 if judgment.votes == TIE else float(pair[side] == judgment.winner)
    return tuple(
        Judgment(i, j, (a, b)) if a >= b else Judgment(j, i, (b, a)) for (i, j), (a, b) in votes.items()
    )


_FEEDBACK = ("instruction", "models", "completions")
_BINARIZED = ("prompt", "prompt_id", "chosen", "rejected", "messages", "score_chosen", "score_rejected")


def read_ultrafeedback(row: Row, context: Context) -> list[Item]:
    """Read the responses to an instruction. System prompts differ; responses with the same one are a group.

    The prompt is the instruction after `custom_system_prompt`, which all models saw except wizardlm-7b
    (OpenBMB/UltraFeedback e662fd2, src/comparison_data_generation/main.py).
    """
    instruction = text(row["instruction"], "instruction")
    models, meta = row["models"], omit(row, _FEEDBACK)
    items = []
    for i, completion in enumerate(objects(row["completions"], "completions")):
        name, prompt = f"completions[{i}]", [user(instruction)]
        model, instructions = completion.get("model"), completion.get("custom_system_prompt")
        if model is None and isinstance(models, list) and i < len(models):
            model = models[i]
        if instructions and model != "wizardlm-7b":
            prompt.insert(0, system(text(instructions, f"{name}.custom_system_prompt")))
        record = {
            "prompt": prompt if len(prompt) > 1 else instruction,
            "response": text(completion.get("response"), f"{name}.response"),
            "reward": _reward(completion, name, context),
            "model": model,
            "meta": meta | omit(completion, ("response", "model", "custom_system_prompt")),
        }
        items.append(Item.of(record, name))
    return items


def _reward(completion: Row, name: str, context: Context) -> float | None:
    """The rating of the chosen aspect, or the mean over all, which is unknown if one of them is."""
    annotations = entry(completion.get("annotations"), f"{name}.annotations")
    aspect = context.chosen("aspect", (*annotations, "mean"))
    ratings = []
    for each in annotations if aspect == "mean" else (aspect,):
        location = f"{name}.annotations.{each}"
        rating = entry(annotations[each], location).get("Rating")
        ratings.append(number(rating, f"{location}.Rating", is_text=True))
    finite = [x for x in ratings if x is not None]
    return sum(finite) / len(finite) if finite and len(finite) == len(ratings) else None


def read_binarized(row: Row, context: Context) -> list[Item]:
    """Read `chosen` and `rejected`, complete conversations; `prompt` and `messages` mostly repeat the chosen
    one."""
    chosen, rejected = objects(row["chosen"], "chosen"), objects(row["rejected"], "rejected")
    prompt = chosen[:-1]
    if not prompt or rejected[:-1] != prompt:
        raise Refused("rejected: expected the messages of chosen, and then another response")
    meta: dict[str, Any] = omit(row, _BINARIZED)
    copies = {"prompt": chosen[-2].get("content"), "messages": chosen}
    meta |= {name: row[name] for name, same in copies.items() if row.get(name, same) != same}
    records = []
    for turns, name in ((chosen, "chosen"), (rejected, "rejected")):
        score = number(row[f"score_{name}"], f"score_{name}")
        names = ("prompt", name)
        records.append(exchange(prompt, turns[-1:], names, meta, prompt_id=row["prompt_id"], reward=score))
    return [Item.pair(records[0], records[1])]


_ROLES = {"prompter": "user", "assistant": "assistant"}
_LABELS = (
    *("spam", "fails_task", "lang_mismatch", "pii", "not_appropriate", "hate_speech", "sexual_content"),
    *("quality", "toxicity", "humor", "helpfulness", "creativity", "violence"),
)


def read_tree(row: Row, context: Context) -> list[Item]:
    """Read a tree. The replies to each message of a prompter are one item; the lowest rank is the best."""
    if "prompt" in row:
        root, name, common = row["prompt"], "prompt", omit(row, ("prompt",))
    elif "replies" in row:
        root, name, common = row, "message", dict[str, Any]()
    else:
        raise Refused(
            "a message without its tree; expected a file whose first record is a message too, or trees"
        )
    items = []
    todo: list[tuple[list[dict[str, Any]], Any, str]] = [([], root, name)]  # turns before, message, location
    while todo:
        history, message, location = todo.pop()
        role = one_of(entry(message, location).get("role"), _ROLES, f"{location}.role")
        turns = [*history, {"role": role, "content": text(message.get("text"), f"{location}.text")}]
        replies = {
            f"{location}.replies[{i}]": m for i, m in enumerate(listed(message.get("replies"), location))
        }
        responses = {path: reply for path, reply in replies.items() if reply.get("role") == "assistant"}
        if responses:
            records = [_replied(turns, reply, path, common, context) for path, reply in responses.items()]
            ranks = [number(reply.get("rank"), f"{path}.rank") for path, reply in responses.items()]
            items.append(Item(tuple(records), tuple(responses), rank_judgments(ranks)))
        todo += [(turns, reply, location) for location, reply in reversed(replies.items())]
    if not items:
        raise SkipRecord("trees without a reply of an assistant")
    return items


def _replied(
    prompt: list[dict[str, Any]], message: Row, name: str, common: dict[str, Any], context: Context
) -> dict[str, Any]:
    """A reply with the mean of each label that people gave; `datasets` has lists of names and values."""
    labels = entry(message.get("labels"), f"{name}.labels")
    if isinstance(labels.get("name"), list):
        labels = dict(zip(labels["name"], labels.get("value", ()), strict=True))
    else:
        labels = {key: entry(label, f"{name}.labels.{key}").get("value") for key, label in labels.items()}
    scores = {"rank": message.get("rank")} | dict.fromkeys(_LABELS) | labels
    meta = common | omit(message, ("text", "role", "replies", "model_name", "labels"))
    return {
        "prompt": prompt,
        "response": text(message.get("text"), f"{name}.text"),
        "model": message.get("model_name"),
        "reward": total(scores, list(scores), context.rewards) if context.rewards else None,
        "meta": meta | ({"labels": labels} if labels else {}),
    }


def trees(lines: Iterator[Line]) -> Iterator[Line]:
    """The trees of a table, whose messages are consecutive and follow the messages that they answer."""
    tree: Line | None = None
    above: dict[str, dict[str, Any]] = {}
    wrong: list[Line] = []
    for line in lines:
        message = {**line.value, "replies": []}
        parent = str(line.value.get("parent_id"))
        if line.error is None and line.value.get("parent_id") is None:
            yield from ([tree] if tree else []) + wrong
            tree, above, wrong = line._replace(value={"prompt": message}), {}, []
        elif line.error is not None:
            wrong.append(line)
            continue
        elif tree is None or parent not in above:
            error = f"parent_id: expected the message_id of one above it in its tree, got {parent!r:.80}"
            wrong.append(line._replace(value={}, error=error))
            continue
        else:
            above[parent]["replies"].append(message)
            tree = tree._replace(size=tree.size + line.size)
        above[str(message.get("message_id"))] = message
    yield from ([tree] if tree else []) + wrong


_TURN = re.compile(r"\n\n(Human|Assistant):")
_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_STEERED = ("prompt", "context", "response1", "response2", "response_1", "response_2")


def is_hh(row: Row) -> bool:
    texts = (row.get("chosen"), row.get("rejected"), row.get("prompt", row.get("chosen")))
    return all(isinstance(x, str) for x in texts) and bool(_TURN.match(texts[2] or ""))


def read_hh(row: Row, context: Context) -> list[Item]:
    """Read complete dialogues, or last turns alone if the dialogue before them is in `prompt`."""
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
    names = [name for name in _ATTRIBUTES if name in row]
    requested = [name for name in names if name in (context.rewards or names)]
    scores = {name: number(row[name], name, is_text=context.is_text) for name in requested}
    return total({**row, **scores}, names, context.rewards)


HELPSTEER = Columns("prompt", "response", judge=_attributes)


def read_helpsteer(row: Row, context: Context) -> list[Item]:
    """Read preferences from -3 (the first response is much better) to 3 (the second is); 0 is a tie.

    Votes are the numbers of annotators who prefer each response, if known; no difference is half a vote for
    each. If the overall preference is 0 the votes are equal, even if more annotators prefer one.
    """
    strength = "overall_preference" if "overall_preference" in row else "preference_strength"
    preference = integer(row[strength], strength)
    if not -3 <= preference <= 3:
        raise wrong(strength, "an integer from -3 to 3", preference)
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


_CONVERSATIONS = ("conversation_a", "conversation_b")
_TEXTS = ("prompt", "response_a", "response_b")
_FLAGS = {"winner_model_a": "model_a", "winner_model_b": "model_b", "winner_tie": "tie"}
_BOTH_BAD = ("both_bad", "bothbad", "tie (bothbad)")


def read_conversations(row: Row, context: Context) -> list[Item]:
    sides = [
        [
            {key: value for key, value in turn.items() if key in TURN}
            for turn in normalized(objects(unpacked(row[name]), name), name)
        ]
        for name in _CONVERSATIONS
    ]
    winner = row["winner"]
    if winner not in (*_FLAGS.values(), *_BOTH_BAD):
        raise wrong("winner", "model_a, model_b, tie or both_bad", winner)
    return _judged(sides, winner, omit(row, (*_CONVERSATIONS, "model_a", "model_b")), row, context)


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
        raise wrong(name, "a list of texts, one per turn", value)
    return turns


def _judged(
    sides: list[list[dict[str, Any]]], winner: str, meta: dict[str, Any], row: Row, context: Context
) -> list[Item]:
    """A pair; a tie has one vote for each. If both are bad there is no pair, and with --choose both_bad=zero
    both have the reward 0."""
    prompts = [until_reply(turns) for turns in sides]
    if not prompts[0] or prompts[0] != prompts[1]:
        raise Refused("conversation_b: expected the messages before the first response of conversation_a")
    records = []
    meta |= {"winner": winner}
    for turns, name, model in zip(sides, _CONVERSATIONS, ("model_a", "model_b")):
        replies = turns[len(prompts[0]) :]
        records.append(exchange(prompts[0], replies, ("prompt", name), meta, model=row.get(model)))
    if winner == "tie":
        return [Item.pair(records[0], records[1], TIE)]
    if winner in _BOTH_BAD:
        is_zero = context.chosen("both_bad", ("none", "zero"), "none") == "zero"
        reward = 0.0 if is_zero else None
        return [Item.of(record | {"reward": reward}, name) for record, name in zip(records, _CONVERSATIONS)]
    better, worse = records if winner == "model_a" else reversed(records)
    return [Item.pair(better, worse)]


def _post(row: Row) -> str:
    """The prompt that the set's own policies got: a Reddit post or an article to summarize."""
    info = entry(row.get("info"), "info")
    if info.get("article") is not None:
        return f"Article:\n{text(info['article'], 'info.article')}\n\nTL;DR:\n"
    subreddit, title, post = (text(info.get(key), f"info.{key}") for key in ("subreddit", "title", "post"))
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def _declared(values: dict[str, Any]) -> Columns | PairColumns:
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if "compose" in options:
        options["compose"] = {"post": _post}[options["compose"]]
    return PairColumns(**options) if "{}" in options["response"] else Columns(**options)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SETS = SimpleNamespace(**{name: _declared(values) for name, values in _TABLES.items()})
