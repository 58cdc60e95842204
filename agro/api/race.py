"""Choose the method and learning rate for a data set by short runs, judged on the same held-out prompts.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all candidates train a quarter of the steps,
the better half continues to half of the steps, and the best one to the end. Each is an ordinary run, resumed
with more steps. A learning-rate schedule that decays to 0 does so in each of these parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agro.api.arguments import METHOD_KEYS, write_rows
from agro.api.reporting_trainer import Trainer
from agro.config import DataConfig, RunConfig
from agro.config.aliases import renamed
from agro.config.override import override
from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import none_if_nan
from agro.io.terminal import plain
from agro.logs.importing import import_files
from agro.models.policy import Policy
from agro.objectives.needs import REF_LOGP
from agro.pages.run.verdict import Verdict
from agro.rewards import load_reward
from agro.rollout.evaluate import heldout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import EpisodeReward, embedded, load_rollout
from agro.runs.rundata import GAIN, Row, load_run
from agro.stats.paired import Comparison, compare
from agro.store import Store
from agro.store.location import is_store, location_of
from agro.store.split import clusters
from agro.train.collate import total_reward
from agro.train.phases import Phase, derive
from agro.train.trainable import kind_of
from agro.train.trainer import BaseTrainer
from agro.types import Prompt

ENOUGH = 50  # with this many prompts to choose the winner, as many others judge it
NOTHING = "do nothing"
SHARED = ("policy", "data", "reward", "sampler", "environment", "train")  # sections that all candidates share


@dataclass(frozen=True)
class Candidate:
    """A recipe with KEY=VALUE changes. `prompts`: the number that it can draw; None if it samples."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    prompts: int | None = None


class Entrant(NamedTuple):
    """A candidate at a learning rate, and the folder of its run."""

    candidate: Candidate
    lr: float
    folder: Path


def race_config(recipe: str | None, overrides: Sequence[str]) -> RunConfig:
    """Build the configuration from a recipe, if one is named, and KEY=VALUE.

    Raises `Refused` for a missing recipe, and if the configuration names no held-out prompts to judge by.
    """
    if recipe is None:
        values: dict[str, Any] = {}
        for item in overrides:
            override(values, item, RunConfig)
        config = RunConfig.of(values, "agro race", overrides)
    else:
        config = RunConfig.load(recipe, overrides)
    if config.data.eval_prompts is None:
        raise Refused(
            "agro race judges by the reward of responses to held-out prompts: expected data.eval_prompts and "
            "a reward for them (reward.name=file.py:function), got no data.eval_prompts. What to do: set "
            "both; if nothing can score a response, train the recipe for the data (agro recipes)"
        )
    return config


class Race:
    """A race in the folder `out`. Runs that were completed there aren't repeated."""

    def __init__(
        self,
        overrides: Sequence[str],
        out: Path,
        rates: Sequence[float] = (),
        say: Callable[[str], None] = print,
        named: str | None = None,
    ) -> None:
        """Raises `Refused` if the candidates can't be judged.

        Args:
            overrides: KEY=VALUE, with policy.model, data.store or data.prompts, data.eval_prompts, a reward.
            rates: learning rates; by default train.lr, a third of it and three times it.
            named: a log or store to learn from, in place of data.store; or an additional candidate, a
                recipe's name or file. All candidates share a file's settings of model, data, reward and
                training, except those of its method.
        """
        overrides = renamed(overrides)  # before the race adds settings, which may replace them
        path = Path(named or "")
        is_recipe = path.suffix == ".toml" or path.name == "config.json" or not path.exists()
        recipe = named if is_recipe else None
        data = race_config(recipe, overrides).data
        if recipe is not None and path.is_file():
            settings = RunConfig.load(recipe).model_dump(mode="json", exclude_unset=True)
            shared = {section: settings.get(section) or {} for section in SHARED}
            for section, keys in METHOD_KEYS.items():
                shared[section] = {key: value for key, value in shared[section].items() if key not in keys}
            overrides = [*key_values(shared), *overrides]
        if named is not None and recipe is None:  # a log or store
            if data.store is not None:
                raise Refused(f"agro race: expected one log, got {named} and data.store={data.store}")
            store = path
            if not is_store(path):
                out.mkdir(parents=True, exist_ok=True)
                store = out / "log.db"
                with Store.open(store) as opened:  # repeating a complete import adds nothing
                    say(str(import_files(opened, [path])))
            overrides = [*overrides, f"data.store={store}"]
            data = data.model_copy(update={"store": str(store)})
        self.overrides, self.out, self.say, self.named = list(overrides), out, say, named
        self.kind = default_for(data)
        self.recipe = recipe or self.kind
        self.default = RunConfig.load(self.recipe, self.overrides)
        train = self.default.train
        if train.steps is None or train.steps < 4:
            got = train.steps or "train.epochs"
            raise Refused(f"agro race: expected train.steps of 4 or more, got {got}")
        load_reward(self.default.reward).close()  # refuse a broken reward before any run
        self.steps: int = train.steps
        self.rates = list(rates)
        if not self.rates:
            if train.lr == "auto":
                raise Refused('agro race: expected --rate, or a number as train.lr, got train.lr = "auto"')
            self.rates = [train.lr, train.lr / 3, 3 * train.lr]
        self.refused: dict[Path, str] = {}  # reasons by run folder
        self.record: dict[str, Any] = {}  # the content of race.json

    def run(self) -> dict[str, Any]:
        """Run what remains and return the record in race.json. Raises `Refused` if no candidate can train."""
        self._open()
        tried = candidates(self.kind, self.default, self.out)
        if self.recipe != self.kind:
            named = Candidate(Path(self.recipe).stem, self.recipe, (), tried[0].prompts)
            tried = [named, *(other for other in tried if other.name != named.name)]
        entrants = []
        for lr in self.rates:
            entrants += [Entrant(each, lr, self.out / f"{each.name}-{lr:.3g}") for each in tried]
        remaining = entrants
        for steps, count in ((self.steps // 4, (len(entrants) + 1) // 2), (self.steps // 2, 1)):
            for entrant in remaining:
                self._measure(entrant, steps)
            remaining = self._ranked(remaining, steps)[:count]
        [winner] = remaining
        if self._latest(winner, self.steps // 2)["gain"] > 0:
            self._measure(winner, self.steps)
            self._ranked(remaining, self.steps)  # refuses a winner that couldn't continue
            self._judge(winner)
        self.record["winner"] = winner.folder.name if self._latest(winner, self.steps)["gain"] > 0 else None
        # Rows: doing nothing; candidates by steps trained, then by reward; refused candidates.
        rows: list[Row] = [{"candidate": NOTHING, "lr": None, "run": None, **self.record["start"]}]
        ranked = [(each, self._latest(each, self.steps)) for each in self._ranked(entrants, self.steps)]
        ranked.sort(key=lambda entry: -entry[1]["step"])
        ranked += [(each, {"refused": self.refused[each.folder]}) for each in entrants if self._is_out(each)]
        for each, result in ranked:
            rows.append({"candidate": each.candidate.name, "lr": each.lr, "run": str(each.folder), **result})
        self.record["rows"] = rows
        self._save()
        return self.record

    def _open(self) -> None:
        """Open race.json or begin it, and split the held-out prompts."""
        settings: dict[str, Any] = {"overrides": self.overrides, "rates": self.rates}
        if self.named is not None:
            settings["named"] = self.named
        path = self.out / "race.json"
        if path.exists():
            self.record = json.loads(path.read_text(encoding="utf-8"))
            if self.record["settings"] != settings:
                raise Refused(
                    f"{path}: this race has other settings, {self.record['settings']}; got {settings}. What "
                    "to do: use the same, or another --out"
                )
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            self.record = {"settings": settings, "default": self.recipe, "runs": {}, "judged": None}
            self._save()
        data = self.default.data
        prompts = load_prompts(data.paths("eval_prompts"), data.columns)
        self.judging: list[Prompt] = []
        self.choosing = [] if data.columns else prompts  # files of prompts have agro's own columns
        if len(self.choosing) >= 2 * ENOUGH:
            order = sorted(prompts, key=lambda prompt: derive("race", prompt.id))
            half = len(order) // 2
            self.choosing, self.judging = order[:half], order[half:]

    def _measure(self, entrant: Entrant, steps: int) -> None:
        """Train a candidate up to `steps`, unless that is done, and record its last evaluation."""
        measured = self.record["runs"].setdefault(entrant.folder.name, {})
        if str(steps) in measured or self._is_out(entrant):
            return
        self.say(f"race: {entrant.folder.name}, {steps} of {self.steps} steps")
        trainer = Trainer if steps == self.steps else BaseTrainer  # only the winner needs a page
        try:
            resume = (entrant.folder / "config.json").exists()
            trainer(self._config(entrant, steps), entrant.folder, resume=resume).run()
        except Refused as error:
            self.refused[entrant.folder] = str(error)
            return
        rows = [row for row in load_run(entrant.folder).rows if row.get("eval_reward") is not None]
        if len(rows) < 2 or rows[-1].get(GAIN) is None:
            self.refused[entrant.folder] = "fewer than two held-out prompts could be scored"
            return
        self.record.setdefault("start", _described(rows[0]))
        measured[str(steps)] = _described(rows[-1])
        self._save()

    def _config(self, entrant: Entrant, steps: int) -> RunConfig:
        changes = [f"train.lr={entrant.lr!r}", f"train.steps={steps}"]
        if self.choosing:
            file = self.out / "choosing.jsonl"
            if not file.exists():
                write_rows(self.choosing, file, "data.eval_prompts")
            changes.append(f"data.eval_prompts={file}")
        return settings_of(entrant.candidate, self.recipe, self.default, self.overrides, changes)

    def _judge(self, winner: Entrant) -> None:
        """Compare the winner with the start on the prompts that weren't used to choose it."""
        if self.record["judged"] is not None or not self.judging:
            return
        self.say(f"race: {winner.folder.name} and the start answer {len(self.judging)} other prompts")
        config = self._config(winner, self.steps)
        trained = {"model": str(winner.folder / "model"), "new": None, "lora": None}
        sampler = config.sampler.of_policy(config.evaluate.temperature, config.evaluate.n)
        seeds = [derive(config.train.seed, name) for name in ("weights", "judge")]
        rewards = []
        for changes in ({}, trained):
            policy = Policy.load(config.policy.model_copy(update=changes), seed=seeds[0])
            engine = embedded(policy, fused=config.engine.fused)
            rollout = load_rollout(policy.encoder, engine, config.environment)
            with closing(EpisodeReward(load_reward(config.reward))) as reward:
                rewards.append(heldout(rollout, reward, self.judging, sampler, seeds[1]).rewards)
            del policy, engine, rollout  # free memory for the next one
        labels = clusters([plain(prompt.text) for prompt in self.judging], config.data.near_copies)
        comparison = compare(rewards[0], rewards[1], labels.tolist())
        values = asdict(comparison) | {"verdict": comparison.verdict}
        self.record["judged"] = {name: none_if_nan(x) for name, x in values.items()}

    def _is_out(self, entrant: Entrant) -> bool:
        return entrant.folder in self.refused

    def _latest(self, entrant: Entrant, steps: int) -> Row:
        """Return the latest measurement at or before `steps`: a resumed race already has later ones."""
        measured: dict[str, Row] = self.record["runs"][entrant.folder.name]
        return measured[max((key for key in measured if int(key) <= steps), key=int)]

    def _ranked(self, entrants: Sequence[Entrant], steps: int) -> list[Entrant]:
        """Sort the entrants that could train by held-out reward at `steps`, highest first."""
        able = [entrant for entrant in entrants if not self._is_out(entrant)]
        if not able:
            raise Refused(f"agro race: no candidate can train. {next(iter(self.refused.values()))}")
        return sorted(able, key=lambda entrant: -self._latest(entrant, steps)["reward"])

    def _save(self) -> None:
        write(self.out / "race.json", json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")


def key_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield nested values as KEY=VALUE, as a user types them, without those that are None."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from key_values(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}={json.dumps(value)}"


def _described(row: Row) -> Row:
    """Return the held-out reward of a metrics row, and its gain over the start, which is 0 at the start."""
    ends = {end: row.get(f"{GAIN}_{end}") for end in ("low", "high", "p", "n")}
    return {
        "step": row["step"],
        "reward": row["eval_reward"],
        "se": row["eval_reward_se"],
        "gain": row.get(GAIN, 0.0),
        **ends,
    }


def conclusion(record: dict[str, Any]) -> str:
    """State the result, and what it doesn't show."""
    winner, judged = record["winner"], record["judged"]
    if winner is None:
        return "Doing nothing won: no candidate is above the start on the held-out prompts."
    chosen = f"{winner} won. The race chose it on these held-out prompts, which flatters it"
    if judged is None:
        return f"{chosen}; measure it on others (agro eval RUN --prompts FILE)."
    values: dict[str, Any] = {
        name: math.nan if x is None else x for name, x in judged.items() if name != "verdict"
    }
    verdict = Verdict.compared(Comparison(**values), "other prompts")
    return f"{chosen}. Against the start: {verdict.sentence}"


def default_for(data: DataConfig) -> str:
    """Return the default recipe for the data that [data] names.

    Raises `Refused` if it names both prompts and a store, or neither.
    """
    if (data.prompts is None) == (data.store is None):
        got = "neither" if data.prompts is None else "both"
        raise Refused(
            "agro race: expected either data.store, a log to learn from, or data.prompts, to sample from; "
            f"got {got}"
        )
    if data.store is None:
        return "fresh"
    with Store.open(location_of(data.store), read_only=True, create=False) as store:
        return kind_of(store)


def candidates(recipe: str, config: RunConfig, out: Path) -> list[Candidate]:
    """List the candidates for a default recipe's data, itself first. `out`: for a store of the winners."""
    if config.data.store is None:
        imitating = Candidate("reinforce", "reinforce", ("objective.baseline=none",))  # rloo has a baseline
        return [Candidate(recipe, recipe), Candidate("rloo", "rloo"), imitating]
    with Store.open(location_of(config.data.store), read_only=True) as store:
        is_held_out = store.split.held_out(config.data)
        if recipe != "pairs":
            return _reward_candidates(store, config, recipe)
        pairs = [pair for pair in store.pairs() if not pair.is_tie]
        winners = list(store.samples(ids=sorted({pair.winner for pair in pairs})))
        path = out / "winners.db"
        if not path.exists():
            out.mkdir(parents=True, exist_ok=True)
            with Store.open(path) as copied:
                copied.append(winner.replace(id=None) for winner in winners)
        prompts = len({winner.prompt_id for winner in winners if not is_held_out(winner.prompt_id)})
    imitated = Candidate("imitation", "sft", (f"data.store={path}",), prompts)
    return [Candidate("pairs", "pairs", (), prompts), imitated, Candidate("dpo", "dpo", (), prompts)]


def _reward_candidates(store: Store, config: RunConfig, kind: str) -> list[Candidate]:
    rewards: dict[str, list[float]] = {}
    is_held_out = store.split.held_out(config.data)
    for sample in store.samples():
        reward = total_reward(sample)
        if reward == reward and not is_held_out(sample.prompt_id):
            rewards.setdefault(sample.prompt_id, []).append(reward)
    values = np.array([reward for group in rewards.values() for reward in group])
    if not len(values) or values.min() == values.max():
        raise Refused(
            f"agro race: {store.path}: expected responses of different rewards, got {len(values)} rewards"
            + (f", all {values[0]:g}" if len(values) else "")
            + ". What to do: score them (agro score), or imitate all (agro train sft)"
        )
    is_right_or_wrong = len(np.unique(values)) == 2
    threshold = float(values.max() if is_right_or_wrong else np.quantile(values, 0.75))
    good = sum(max(group) >= threshold for group in rewards.values())
    imitated = Candidate("imitation", "sft", (f"data.min_reward={threshold!r}",), good)
    if kind == "feedback":
        middle = float(values.min() + values.max()) / 2
        dro = Candidate("dro", "dro", ("data.replay=1",), len(rewards))
        kto = Candidate("kto", "kto", (f"objective.threshold={middle!r}",), len(rewards))
        return [Candidate("feedback", "feedback", (), len(rewards)), imitated, dro, kto]
    if not is_right_or_wrong:
        imitated = Candidate("imitation", "sft", ("data.best_of_group=true",), len(rewards))
    unequal = sum(min(group) < max(group) for group in rewards.values())
    falling = f"objective.imitation={{start=1.0, end=0.0, steps={config.train.steps}}}"
    mixed = Candidate("log+imitation", "log", (falling,), unequal)
    return [Candidate("log", "log", (), unequal), imitated, mixed]


def settings_of(
    candidate: Candidate, recipe: str, default: RunConfig, overrides: Sequence[str], changes: Sequence[str]
) -> RunConfig:
    """Build a candidate's configuration, with groups, warm-up, schedule and lengths from `default`.

    `overrides`: the user's; options of the objective apply to the default `recipe` only. `changes`: those of
    the race, such as the rate and the steps.
    """
    train = default.train
    groups = train.groups if candidate.prompts is None else min(train.groups, max(candidate.prompts, 1))
    assert train.steps is not None
    same = [
        f"train.warmup={min(train.warmup, train.steps // 8)}",
        f"train.schedule={train.schedule}",
        f"sampler.max_new={default.sampler.max_new}",
        "evaluate.every=0",
        "train.keep=1",
    ]
    if candidate.prompts is not None and default.data.group_size is not None:
        same.append(f"data.group_size={default.data.group_size}")
    user = [item for item in overrides if candidate.recipe == recipe or not item.startswith("objective.")]
    items = [*same, *user, *candidate.changes, f"train.groups={groups}", *changes]
    config = RunConfig.load(candidate.recipe, items)
    caches = config.data.replay == 1 and any(REF_LOGP in phase.needs for phase in Phase.all(config))
    if not caches or config.policy.cache_reference:
        return config
    return RunConfig.load(candidate.recipe, [*items, "policy.cache_reference=true"])
