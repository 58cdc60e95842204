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
from agro.logs.column_kinds import ASSISTANTS, FEW, Column, columns_of, dialog_keys, quoted, words
from agro.logs.format_table import lines_of
from agro.logs.import_report import ImportReport, Options
from agro.logs.importing import import_files
from agro.logs.labels import WORDS, word_of
from agro.store import Store

ROWS = 200  # records that are looked at

# What words of judgments are worth, besides those that need no --reward-map.
WORTH: dict[str, float | None] = {
    **dict.fromkeys(
        words(
            "good correct right pass passed helpful accepted accept approved success excellent "
            "great ja oui sí hoch"
        ),
        1.0,
    ),
    **dict.fromkeys(
        words(
            "bad incorrect wrong fail failed unhelpful rejected reject denied failure unsatisfied poor "
            "nein non terrible runter"
        ),
        0.0,
    ),
    **dict.fromkeys(("not helpful", "not correct"), 0.0),
    **dict.fromkeys(("very satisfied", "very helpful", "strongly agree"), 1.0),
    **dict.fromkeys(words("satisfied agree"), 0.75),
    **dict.fromkeys(words("dissatisfied disagree"), 0.25),
    **dict.fromkeys(("very dissatisfied", "very unsatisfied", "strongly disagree"), 0.0),
    **dict.fromkeys(("neutral", "partial", "partially correct", "mixed", "ok", "okay", "tie"), 0.5),
    **dict.fromkeys(words("unclear unknown skip skipped none unsure keine -"), None),
}
JUDGING = ("number", "flag", "word")  # types of columns that may be judgments
TIES = words("tie both equal draw none neither same 0 bothbad")


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
        worth = [f"{word}={'null' if x is None else f'{x:g}'}" for word, x in self.reward_map.items()]
        if self.undefined is not None:
            parts += ["--map", f"reward={self.undefined.path}"]
            worth = [f"{word}=NUMBER" for word in self.undefined.distinct[:FEW]]
        if worth:
            parts += ["--reward-map", ",".join(worth)]
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
        if report is not None and report.samples and 2 * report.refused_count <= len(rows):
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
    roles = [f"({who} == {_json(n)} && 'assistant')" for n in names if n.casefold() in ASSISTANTS]
    roles += [f"({who} == {_json(n)} && 'system')" for n in names if n.casefold() == "system"]
    path = _step(column)
    return f"{path}[].{{role: {' || '.join(roles)} || 'user', content: {said}}}"


def _json(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _guesses(path: Path, columns: Sequence[Column], known: ImportReport | None) -> Iterator[Proposal]:
    """Proposals, the likeliest first."""
    reward, undefined = _reward(columns)
    worth = {} if reward is None else _worth(reward) or {}
    reasons = [] if reward is None else [f"{reward.path} is the reward: it has {_content(reward)}"]
    if undefined is not None:
        reasons.append(f"{undefined.path} may be the reward; say what its words are worth")
    if known is not None and reward is not None:
        known_format = (*reasons, "prompt and response are those of a known format")
        yield Proposal(path, tuple(columns), {}, (reward.path,), worth, None, known_format)
    for mapping, reason in _responses(columns, reward):
        is_pair = "chosen" in mapping
        whole = dict(mapping)
        if reward is not None and not is_pair:
            whole.setdefault("reward", _one_each(reward, mapping))
        inside = "".join(whole.values())
        aside = [
            c.path
            for c in columns
            if c.type in JUDGING and c.path not in inside and (is_pair or c is not reward)
        ]
        if any("*" in each for each in mapping.values()):
            whole["source"] = f"'{path.stem}'"
        said = (
            reason,
            *(() if is_pair or "reward" in mapping else reasons),
            *((f"not used: {', '.join(aside)}",) if aside else ()),
        )
        yield Proposal(
            path,
            tuple(columns),
            whole,
            reward_map={} if is_pair or "reward" in mapping else worth,
            undefined=None if is_pair else undefined,
            reasons=tuple(said),
        )


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
    return f"the words {', '.join(column.distinct[:FEW])}"


def _responses(columns: Sequence[Column], reward: Column | None) -> Iterator[tuple[dict[str, str], str]]:
    """Mappings of prompt and response, of pairs, or of messages, and why."""
    texts = [c for c in columns if c.type in ("text", "word", "texts") and c is not reward and c.tells]
    asked = [*texts, *(c for c in columns if c.type == "messages" and _is_asked(c))]
    prompt = _best([c for c in asked if c.is_spoken or c.type != "text"] or asked, "prompt")
    if prompt is not None:
        others = [c for c in texts if c is not prompt]
        yield from _pairs(prompt, others, columns)
        yield from _of_several(prompt, others, columns)
        said, right = _said(others)
        response = _best(said, "response")
        if response is not None:
            yield (
                {"prompt": prompt.path, "response": response.path, **right},
                "prompt and response by their names",
            )
    dialogs = [c for c in columns if c.type == "messages"]
    if dialogs:
        dialog = _best(dialogs, "messages") or dialogs[0]
        yield {"messages": dialog.path}, f"{dialog.path} has messages, the last one of the assistant"
    for column in columns:
        if column.type == "dialog":
            yield {"messages": _as_messages(column)}, f"{column.path} has the turns of a dialog"
    long, right = _said([c for c in texts if c.is_spoken or c.type == "texts"])
    if len(long) >= 2:
        response = _best(long, "response")
        if response is None and prompt is not None:
            response = next(c for c in long if c is not prompt)
        response = response or long[1]
        others = [c for c in long if c is not response]
        first = prompt or next((c for c in others if c.is_spoken), others[0])
        yield (
            {"prompt": first.path, "response": response.path, **right},
            "prompt and response by content: the columns of long text, in their order",
        )


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
            said = {word: side for word, side in sides.items() if side is not column}
            if (named := _side_names(column.values, said)) is not None:
                yield _preferred(prompt, column, *named)


def _sides(columns: Sequence[Column]) -> Iterator[dict[str, Column]]:
    """Columns whose names differ in one word, such as response_a and response_b, by this word."""
    alike: dict[tuple[str | None, ...], dict[str, Column]] = {}
    for column in columns:
        words = column.tokens
        for i, word in enumerate(words):
            alike.setdefault((*words[:i], None, *words[i + 1 :]), {}).setdefault(word, column)
    yield from (sides for sides in alike.values() if len(sides) > 1)


def _side_names(
    values: Iterable[Any], sides: Mapping[str, Column]
) -> tuple[list[tuple[Column, Any]], bool] | None:
    """The sides that a column of winners names, each with its value, and whether it has ties; None where it
    has other words, or names one side alone."""
    winners: dict[str, Any] = {}
    has_ties = False
    for value in values:
        tokens = re.findall(r"[^\W_]+", str(value).casefold())
        named = [mark for mark, side in sides.items() if mark in tokens or str(value) == side.path]
        if len(named) == 1 and winners.setdefault(named[0], value) == value:
            continue
        if str(value).casefold().strip() not in TIES and {"tie", "both"}.isdisjoint(tokens):
            return None
        has_ties = True
    found = [(side, winners[mark]) for mark, side in sides.items() if mark in winners]
    return (found, has_ties) if len(found) > 1 else None


def _preferred(
    prompt: Column, winner: Column, sides: Sequence[tuple[Column, Any]], has_ties: bool
) -> tuple[dict[str, str], str]:
    """Of a tie both votes are equal, which says that neither is better. Of more than two responses the best
    one has the reward true."""
    said, paths = _step(winner), [_step(side) for side, _ in sides]
    reason = f"{winner.path} says which of {' and '.join(side.path for side, _ in sides)} is better"
    is_best = [f"{said} == {_json(name)}" for _, name in sides]
    if len(sides) > 2:
        rewards = ", ".join(f"{said} && {each}" for each in is_best)
        mapping = {"prompt": prompt.path, "response": f"[{', '.join(paths)}]", "reward": f"[{rewards}]"}
        return mapping, reason.replace("better", "best")
    (a, b), (is_a, is_b) = paths, is_best
    chosen, rejected = f"({is_a} && {a}) || ({is_b} && {b})", f"({is_a} && {b}) || ({is_b} && {a})"
    votes = {}
    if has_ties:
        chosen, rejected = f"{said} && (({is_b} && {b}) || {a})", f"{said} && (({is_b} && {a}) || {b})"
        votes = {"votes_chosen": "`1`", "votes_rejected": f"(({is_a} || {is_b}) && `0`) || `1`"}
    mapping = {"prompt": prompt.path, "chosen": chosen, "rejected": rejected, **votes}
    return mapping, reason


def _step(column: Column) -> str:
    path = column.path
    return path if re.fullmatch(r"[A-Za-z_][\w.]*", path) else json.dumps(path, ensure_ascii=False)


def _best(columns: Iterable[Column], role: str) -> Column | None:
    """The column whose name says it best, of equal ones the one with sentences; None where no name does."""
    named = [column for column in columns if column.named(role)]
    return max(named, key=lambda c: (c.named(role), c.is_spoken, c.type != "word"), default=None)


def _reward(columns: Sequence[Column]) -> tuple[Column | None, Column | None]:
    """The column of rewards; without one, what may be it, if somebody says what its words are worth."""
    judging = [c for c in columns if c.type in (*JUDGING, "numbers")]
    candidates = [c for c in judging if c.named("reward")]
    undefined: Column | None = None
    while (column := _best(candidates, "reward") or _best(judging, "rank")) is not None:
        if _worth(column) is not None:
            return column, None
        undefined = undefined or column
        candidates, judging = ([c for c in part if c is not column] for part in (candidates, judging))
    unnamed = [c for c in columns if c.type in JUDGING and c.tells and 2 * len(c.distinct) <= len(c.values)]
    unnamed = [c for c in unnamed if c.type == "number" or (len(c.distinct) == 2 and _worth(c) is not None)]
    if undefined is None and len(unnamed) == 1:  # grades repeat; counters and times don't
        return unnamed[0], None
    return None, undefined


def _worth(column: Column) -> dict[str, float | None] | None:
    """What --reward-map has to say of its words and ranks; None where the worth of one is unknown."""
    if column.type == "number" and column.named("rank") and len(column.distinct) <= FEW:
        return {rank: -float(rank) for rank in column.distinct if rank.isdecimal()}
    if column.type != "word" or all(word_of(word) in WORDS for word in column.distinct):
        return {}
    worth: dict[str, float | None] = {}
    for word in column.distinct:
        try:
            worth[word] = _worth_of(word_of(word))
        except KeyError:
            return None
    return worth


def _worth_of(word: str) -> float | None:
    """Of a word, stars, a percentage or a fraction; raises `KeyError` for others."""
    if re.fullmatch("[★☆⭐]+", word):
        return float(len(word) - word.count("☆"))
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:(%)|/ ?(\d+)|stars?|points?|[:(–].*| [^\d/%]+)", word):
        return float(match[1]) / (100.0 if match[2] else float(match[3] or 1))
    return WORDS[word] if word in WORDS else WORTH[word]
