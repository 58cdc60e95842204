"""What the columns of an unknown log are: a proposal for `agro import`, by their names and their content.

A proposal is tried on the first records before it is made, and names what it rests on. Nothing is imported by
a guess that wasn't printed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agro.errors import Refused
from agro.io.json_values import unpacked
from agro.logs.column_kinds import (
    FEW,
    JUDGING,
    TEXTS,
    Column,
    assistants_of,
    columns_of,
    dialog_keys,
    quoted,
)
from agro.logs.column_names import SIDES, TIES, YES_NO, plain, worth_of
from agro.logs.format_table import lines_of
from agro.logs.import_report import ImportReport, Options
from agro.logs.importing import import_files
from agro.logs.labels import WORDS, word_of, written_words
from agro.store import Store

ROWS = 200  # records that are looked at


@dataclass(frozen=True)
class Proposal:
    """How to import a file. `reasons`: what it rests on, and what wasn't used; `tried`: on how many records,
    and how many samples and rewards or pairs came of them. Without `mapping` and `rewards` nothing is
    proposed."""

    path: Path
    columns: tuple[Column, ...]
    mapping: Mapping[str, str] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    reward_map: Mapping[str, float | None] = field(default_factory=dict)
    undefined: Column | None = None  # may be the reward, but nobody knows what its words are worth
    reasons: tuple[str, ...] = ()
    tried: str = ""

    def __bool__(self) -> bool:
        return bool(self.mapping or self.rewards)

    @property
    def is_judged(self) -> bool:
        """Whether it has rewards or pairs, or would have with --reward-map."""
        has_judgments = self.rewards or not {"reward", "chosen"}.isdisjoint(self.mapping)
        return bool(has_judgments) or self.undefined is not None

    def options(self) -> Options:
        options: Options = {"mapping": self.mapping}
        if self.rewards:
            options["rewards"] = dict.fromkeys(self.rewards, 1.0)
        if self.reward_map:
            options["reward_map"] = self.reward_map
        return options

    def command(self, *stores: str) -> str:
        """The full command; of words whose worth is unknown with NUMBER in its place."""
        parts = ["agro", "import", str(self.path)]
        for store in stores or ("STORE.db",):
            parts += ["--store", store]
        for name, column in self.mapping.items():
            parts += ["--map", f"{name}={column}"]
        for name in self.rewards:
            parts += ["--reward", name]
        worth = {word: "null" if x is None else f"{x:g}" for word, x in self.reward_map.items()}
        if self.undefined is not None:
            parts += ["--map", f"reward={self.undefined.path}"]
            worth = {
                word: "null" if word in self.undefined.unrated else "NUMBER"
                for word in self.undefined.distinct[:FEW]
            }
        if worth:
            parts += ["--reward-map", written_words(worth)]
        return " ".join(map(shlex.quote, parts))

    def to_json(self, *stores: str) -> dict[str, Any]:
        return {
            "command": self.command(*stores) if self else None,
            "undefined": None if self.undefined is None else self.undefined.distinct,
            "columns": [column.about() for column in self.columns],
            "reasons": self.reasons,
            "tried": self.tried,
        }


def propose(path: Path) -> Proposal | None:
    """A proposal for a file; None where it needs none: its format is known, and it has rewards or pairs.

    Raises `Refused` where the file can't be read.
    """
    known = _tried(path, {})
    if known is not None and not known.refused_count and (known.scored or known.pairs):
        return None
    rows = [line.value for line in islice(lines_of(path, None), ROWS) if not line.error]
    columns = columns_of(rows)
    best: Proposal | None = None
    for guess in _guesses(path, columns, known):
        report = _tried(path, guess.options())
        if report is not None and report.refused_count <= report.samples:
            tried = f"{report.samples} samples, {report.scored} with a reward, {report.pairs} pairs"
            if report.refused_count:
                tried += f", {report.refused_count} refused ({report.refused[0].reason:.120})"
            best = Proposal(**{**vars(guess), "tried": f"the first {len(rows)} records: {tried}"})
            break
    if best is not None and (known is None or best.is_judged):
        return best
    return None if known is not None and not known.refused_count else Proposal(path, columns)


def _tried(path: Path, options: Options) -> ImportReport | None:
    """What comes of the first records with these options; None where none can be taken."""
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        try:
            report = import_files(store, [path], limit=ROWS, **options)  # type: ignore[misc]
        except Refused:
            return None
        return report if report.samples else None


def _as_messages(column: Column) -> str:
    """The turns of a dialog as messages."""
    dialogs = [unpacked(value) for value in column.values]
    keys = dialog_keys(dialogs[0])
    assert keys is not None
    who, said = map(quoted, keys)
    names = dict.fromkeys(turn[keys[0]] for dialog in dialogs for turn in dialog)
    assistants = {name for dialog in dialogs for name in assistants_of({turn[keys[0]] for turn in dialog})}
    roles = [f"({who} == {_json(n)} && 'assistant')" for n in names if n in assistants]
    roles += [f"({who} == {_json(n)} && 'system')" for n in names if n.casefold() == "system"]
    path = _step(column)
    return f"{path}[].{{role: {' || '.join(roles)} || 'user', content: {said}}}"


def _json(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _guesses(path: Path, columns: Sequence[Column], known: ImportReport | None) -> Iterator[Proposal]:
    """Proposals, the likeliest first."""
    reward, _ = _reward(columns, "")
    if known is not None and reward is not None:
        reasons = (*_why(reward), "prompt and response are those of a known format")
        yield Proposal(path, tuple(columns), {}, (reward.path,), _worth(reward) or {}, None, reasons)
    for mapping, reason in _responses(columns):
        whole, said = dict(mapping), [reason]
        worth: Mapping[str, float | None] = {}
        undefined = None
        if "reward" in mapping:
            judged = [_worth(c) or {} for c in columns if c.type == "word" and _step(c) in mapping["reward"]]
            worth = {word: number for each in judged for word, number in each.items()}
        elif "chosen" not in mapping:
            reward, undefined = _reward(columns, mapping.get("response", ""))
            if reward is not None:
                whole["reward"], worth = _one_each(reward, mapping), _worth(reward) or {}
                said += _why(reward)
            elif undefined is not None:
                said.append(f"{undefined.path} may be the reward; say what its words are worth")
        if any("*" in each for each in mapping.values()):
            whole["source"] = f"'{path.stem}'"
        inside = "".join(whole.values())
        aside = [c.path for c in columns if c.type in JUDGING and c.path not in inside and c is not undefined]
        if aside:
            said.append(f"not used: {', '.join(aside)}")
        yield Proposal(path, tuple(columns), whole, (), worth, undefined, tuple(said))


def _why(reward: Column) -> list[str]:
    reasons = [f"{reward.path} is the reward: it has {_content(reward)}"]
    if unrated := sorted(reward.unrated):
        reasons.append(f"of {reward.path} taken as unknown: {', '.join(unrated)}")
    return reasons


def _one_each(reward: Column, mapping: Mapping[str, str]) -> str:
    """The path of the reward; the mean where a response has several."""
    owner, star, value = reward.path.rpartition("[*]")
    if not star or reward.type != "number" or any(f"{owner}[*]" in path for path in mapping.values()):
        return reward.path
    record, inner, listed = owner.rpartition("[*].")
    return f"{record}{inner}avg({listed}[]{value})"


def _content(column: Column) -> str:
    if column.named("rank") and _worth(column):
        return "ranks, of which a lower one is taken as better"
    if column.type in ("number", "numbers"):
        return "numbers, of which a higher one is taken as better"
    return f"the words {', '.join(word for word in column.distinct[:FEW] if word not in column.unrated)}"


def _responses(columns: Sequence[Column]) -> Iterator[tuple[dict[str, str], str]]:
    """Mappings of prompt and response, of pairs, or of messages, and why."""
    texts = [c for c in columns if c.type in TEXTS and c.tells]
    dialogs = [c for c in columns if c.type == "messages"]
    asked = [*(c for c in texts if c.type != "texts"), *filter(_is_asked, dialogs)]
    prompt = _best([c for c in asked if c.is_spoken or c.type != "text"] or asked, "prompt")
    if prompt is not None:
        others = [c for c in texts if c is not prompt]
        yield from _pairs(prompt, others, columns)
        yield from _of_several(prompt, others, columns)
        said, right = _said([c for c in others if not _is_judged(c)])
        response = _best([c for c in said if c.type != "word" or c.is_spoken] or said, "response")
        if response is not None:
            yield (
                {"prompt": _asked_in(prompt, texts), "response": response.path, **right},
                "prompt and response by their names",
            )
    if dialogs:
        dialog = _best(dialogs, "messages") or dialogs[0]
        yield {"messages": dialog.path}, f"{dialog.path} has messages, the last one of the assistant"
    for column in columns:
        if column.type == "dialog":
            yield {"messages": _as_messages(column)}, f"{column.path} has the turns of a dialog"
    yield from _by_content(prompt, texts)


def _by_content(prompt: Column | None, texts: Sequence[Column]) -> Iterator[tuple[dict[str, str], str]]:
    """The response is the longest text but the prompt's, which stands before it; comments only where there
    is nothing else."""
    long, right = _said([c for c in texts if c.is_spoken or c.type == "texts"])
    meant = [c for c in long if not c.is_aside]
    spoken = meant if len(meant) > 1 else long
    if len(spoken) < 2:
        return
    response = _best([c for c in spoken if c is not prompt], "response")
    if response is None:
        last = [c for c in spoken if c is not prompt and (prompt is not None or c is not spoken[0])]
        response = max(last, key=lambda c: c.length)
    if prompt is None or prompt is response:
        prompt = next(c for c in spoken if c is not response)
    reason = "prompt and response by content: the columns of long text, in their order"
    yield {"prompt": prompt.path, "response": response.path, **right}, reason


def _asked_in(prompt: Column, texts: Sequence[Column]) -> str:
    """The path of a prompt; of a title with its body both."""
    owner, dot, name = prompt.path.rpartition(".")
    bodies = [c for c in texts if c.path in (f"{owner}{dot}body", f"{owner}{dot}selftext")]
    if name != "title" or not bodies:
        return prompt.path
    body = bodies[0].path.rpartition(".")[2]
    return f'{owner}{dot}join(`"\\n\\n"`, [title, {body}])'


def _said(texts: Sequence[Column]) -> tuple[list[Column], dict[str, str]]:
    """Those that may be responses, and the mapping of the answer that would be right, where one is named."""
    right = _best(texts, "answer")
    said = [c for c in texts if c is not right]
    if right is None or not any(c.named("response") for c in said):
        return list(texts), {}
    return said, {"answer": right.path}


def _of_several(
    prompt: Column, others: Sequence[Column], columns: Sequence[Column]
) -> Iterator[tuple[dict[str, str], str]]:
    """Responses of several models in a row, each with its score: gpt_answer, gpt_score, llama_answer, …"""
    parts: dict[str, tuple[Column, Column]] = {}
    for response in (c for c in others if c.named("response")):
        for score in (c for c in columns if c.type in JUDGING and c.named("reward")):
            common = [word for word in response.tokens if word in score.tokens]
            if len(common) == 1 and len(response.tokens) == len(score.tokens) == 2:
                parts.setdefault(common[0], (response, score))
    if len(parts) < 2:
        return
    responses, scores = (", ".join(_step(pair[i]) for pair in parts.values()) for i in (0, 1))
    mapping = {"prompt": prompt.path, "response": f"[{responses}]", "reward": f"[{scores}]"}
    yield {**mapping, "source": _json(list(parts))}, f"responses of {', '.join(parts)}, each with its score"


def _is_judged(column: Column) -> bool:
    """Whether its words are known judgments."""
    return (
        column.type == "word" and column.tells and bool(column.named("reward")) and _worth(column) is not None
    )


def _is_asked(column: Column) -> bool:
    """Whether messages end before the assistant's turn."""
    return all(unpacked(value)[-1]["role"] != "assistant" for value in column.values)


def _pairs(
    prompt: Column, others: Sequence[Column], columns: Sequence[Column]
) -> Iterator[tuple[dict[str, str], str]]:
    chosen = _best(others, "chosen")
    rejected = _best([c for c in others if c is not chosen], "rejected")
    if chosen is not None and rejected is not None:
        mapping = {"prompt": prompt.path, "chosen": chosen.path, "rejected": rejected.path}
        yield mapping, "a better and a worse response by their names"
    for sides in _sides(others):
        for column in columns:
            if column is prompt or not column.named("preference"):
                continue
            named = {mark: side for mark, side in sides.items() if side is not column}
            said = _models_named(column, named, columns) or _sides_named(column, named)
            if said is not None:
                yield _preferred(prompt, column, *said)


def _sides(columns: Sequence[Column]) -> Iterator[dict[str, Column]]:
    """Columns whose names differ in one word, such as response_a and response_b, by this word."""
    alike: dict[tuple[str | None, ...], dict[str, Column]] = {}
    for column in columns:
        words = column.tokens
        for i, word in enumerate(words):
            alike.setdefault((*words[:i], None, *words[i + 1 :]), {}).setdefault(word, column)
    found = [sides for sides in alike.values() if len(sides) > 1]
    yield from sorted(found, key=lambda sides: (_are_ordinals(sides), _said_in(sides)), reverse=True)


def _are_ordinals(marks: Iterable[str]) -> bool:
    return all(mark in words for mark, words in zip(sorted(marks), SIDES))


def _said_in(sides: Mapping[str, Column]) -> float:
    return min(column.length for column in sides.values())


def _sides_named(column: Column, sides: Mapping[str, Column]) -> tuple[list[tuple[Column, str]], str] | None:
    """The sides that a column of winners names, each with the condition that it is better, and the condition
    that both are equal, "" without ties; None where it names fewer than two."""
    better: dict[str, list[str]] = {}
    ties: list[str] = []
    others = 0
    for value in map(str, column.values):
        mark = _side_of(value, sides)
        if mark is not None:
            better.setdefault(mark, []).append(value)
        elif _is_tie(value):
            ties.append(value)
        else:
            others += 1
    if len(better) < 2 or 5 * others > len(column.values):
        return None
    won = [(sides[mark], _is_one_of(column, values)) for mark, values in better.items()]
    won.sort(key=lambda each: list(sides.values()).index(each[0]))
    return won, _is_one_of(column, ties) if ties else ""


def _side_of(value: str, sides: Mapping[str, Column]) -> str | None:
    """The side that a word of a column of winners names; None for none, or several."""
    tokens = re.findall(r"[^\W_]+", plain(value))
    if match := re.match(r"\W*(\w+)\W*?([<>])", plain(value)):  # A > B
        tokens = [match[1]] if match[2] == ">" else tokens[1:]
    named = [mark for mark, side in sides.items() if mark in tokens or value.strip() == side.path]
    if not named and len(sides) == len(SIDES) and _are_ordinals(sides):
        named = [mark for mark, words in zip(sorted(sides), SIDES) if not words.isdisjoint(tokens)]
    return named[0] if len(named) == 1 else None


def _models_named(
    winner: Column, sides: Mapping[str, Column], columns: Sequence[Column]
) -> tuple[list[tuple[Column, str]], str] | None:
    """As `_sides_named`, where winners are named by their models, which have columns of their own."""
    values = dict.fromkeys(str(value) for value in winner.values if str(value) not in winner.unrated)
    ties = [value for value in values if _is_tie(value)]
    for models in _sides(columns):
        if models.keys() != sides.keys() or winner in models.values() or models == sides:
            continue
        names = {str(value) for column in models.values() for value in column.values}
        if names and values.keys() - set(ties) <= names:
            won = [(sides[mark], f"{_step(winner)} == {_step(model)}") for mark, model in models.items()]
            return won, _is_one_of(winner, ties) if ties else ""
    return None


def _is_tie(value: str) -> bool:
    said = plain(value).strip()
    return said in TIES or not {"tie", "both"}.isdisjoint(re.findall(r"\w+", said))


def _is_one_of(column: Column, values: Iterable[Any]) -> str:
    said = [f"{_step(column)} == {_json(_as_in(column, value))}" for value in dict.fromkeys(values)]
    return f"({' || '.join(said)})" if len(said) > 1 else said[0]


def _as_in(column: Column, text: str) -> Any:
    """A value of a column by its text."""
    return next(value for value in column.values if str(value) == text)


def _preferred(
    prompt: Column, winner: Column, sides: Sequence[tuple[Column, str]], is_tie: str
) -> tuple[dict[str, str], str]:
    """Of a tie both votes are equal, which says that neither is better. Of more than two responses the best
    one has the reward true."""
    said, paths = _step(winner), [_step(side) for side, _ in sides]
    reason = f"{winner.path} says which of {' and '.join(side.path for side, _ in sides)} is better"
    if len(sides) > 2:
        rewards = ", ".join(f"{said} && ({is_best})" for _, is_best in sides)
        mapping = {"prompt": prompt.path, "response": f"[{', '.join(paths)}]", "reward": f"[{rewards}]"}
        return mapping, reason.replace("better", "best")
    (a, b), (is_a, is_b) = paths, [is_best for _, is_best in sides]
    chosen, rejected = f"({is_a} && {a}) || ({is_b} && {b})", f"({is_a} && {b}) || ({is_b} && {a})"
    votes = {}
    if is_tie:
        chosen, rejected = f"{chosen} || ({is_tie} && {a})", f"{rejected} || ({is_tie} && {b})"
        votes = {"votes_chosen": "`1`", "votes_rejected": f"({is_tie} && `1`) || `0`"}
    mapping = {"prompt": prompt.path, "chosen": chosen, "rejected": rejected, **votes}
    return mapping, reason


def _step(column: Column) -> str:
    path = column.path
    return path if re.fullmatch(r"[A-Za-z_][\w.]*", path) else json.dumps(path, ensure_ascii=False)


def _best(columns: Iterable[Column], role: str) -> Column | None:
    """The column whose name says it best, of equal ones the one with sentences; None where no name does."""
    named = [column for column in columns if column.named(role)]
    return max(named, key=lambda c: (c.named(role), c.is_spoken, c.type != "word", c.length), default=None)


def _reward(columns: Sequence[Column], response: str) -> tuple[Column | None, Column | None]:
    """The column of rewards; without one, what may be it, if somebody says what its words are worth.

    One that belongs to each response comes before one of another list, which has several numbers for it.
    """
    judging = [c for c in columns if c.type in (*JUDGING, "numbers")]
    judging = [c for c in judging if c.type != "numbers" or not response or response in _lists(columns)]
    inside = [c for c in judging if _shares_lists(c.path, response)] if response else judging
    for part in (inside, [c for c in judging if c not in inside]):
        candidates = sorted((c for c in part if c.named("reward")), key=_judges, reverse=True)
        if not any(_worth(c) is not None for c in candidates):
            candidates += sorted((c for c in part if c.named("rank")), key=lambda c: -c.named("rank"))
        for column in candidates:
            if _worth(column) is not None:
                return column, None
        if candidates:
            return None, candidates[0]
    unnamed = [c for c in judging if c.type != "numbers" and c.tells and not c.is_aside]
    graded = [c for c in unnamed if c.type == "word" and _is_graded(c)]
    unnamed = graded or [c for c in unnamed if 2 * len(c.distinct) <= len(c.values) and _may_be_judged(c)]
    return (unnamed[0] if len(unnamed) == 1 else None), None


def _is_graded(column: Column) -> bool:
    """Whether its words, such as good and bad, are judgments whatever its name is."""
    return len(set((_worth(column) or {}).values()) - {None}) > 1 and not set(column.distinct) <= YES_NO


def _may_be_judged(column: Column) -> bool:
    """Grades repeat; counters and times don't."""
    return column.type == "number" or (len(column.distinct) == 2 and _worth(column) is not None)


def _judges(column: Column) -> float:
    """Of equal names those of people come first."""
    by_people = 0.01 if {"human", "user", "customer"} & set(column.tokens) else 0.0
    return column.named("reward") * (1.0 if column.tells else 0.1) + by_people


def _lists(columns: Sequence[Column]) -> list[str]:
    return [column.path for column in columns if column.type == "texts"]


def _shares_lists(path: str, response: str) -> bool:
    """Whether a value is of the record, or of the item, that the response is of."""
    owner = path.rpartition("[*]")[0]
    inner = response.rpartition("[*]")[0]
    return owner == inner


def _worth(column: Column) -> dict[str, float | None] | None:
    """What --reward-map has to say of its words and ranks; None where the worth of one is unknown."""
    unrated: dict[str, float | None] = dict.fromkeys(word.strip() for word in column.unrated)
    said = [word for word in column.distinct if word not in column.unrated]
    if column.type == "number" and column.named("rank") and len(said) <= FEW:
        return {rank: -float(rank) for rank in said if rank.isdecimal()} | unrated
    if column.type != "word":
        return unrated
    if all(word_of(word) in WORDS for word in said) and not unrated:
        return {}
    try:
        worth = {word.strip(): worth_of(word) for word in said}
    except KeyError:
        return None
    known = [number for number in worth.values() if number is not None]
    if max(known, default=0.0) == 0.5 and min(known) < 0.5:  # ok beside not ok
        worth = {word: 1.0 if number == 0.5 else number for word, number in worth.items()}
    return worth | unrated
