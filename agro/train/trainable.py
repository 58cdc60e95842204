"""Whether an objective can train on what a store has, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives import Need, get
from agro.objectives.needs import PAIRS, REWARD, VOTES, grouping, ordered
from agro.store import Known, Pair, Store
from agro.train.schedule import options_at


def check_store(config: RunConfig, store: Store) -> list[str]:
    """Raise `Refused` where the objective can't train on what would be drawn; else notes on what isn't drawn."""
    data = config.data
    rows = store.known(roles=data.roles, sources=data.sources)
    if not rows and data.replay < 1:
        return ["the store is empty: all groups are sampled until it isn't"]
    if not rows:
        raise Refused(
            f"data.store: {store.path} has no samples that data.roles and data.sources admit; import some (agro import)"
        )
    options = options_at(config.objective.options, 0)
    check = _Check(config, store, rows, get(config.objective.name).needed(options))
    notes = check.samples()
    sizes = check.pairs() if PAIRS in check.needs else check.responses()
    return notes + check.groups(sizes, drop=options.get("singletons") == "drop") + check.notes


@dataclass
class _Check:
    """The stored samples of a run, `rows`, against the needs of its objective."""

    config: RunConfig
    store: Store
    rows: Sequence[Known]
    needs: Set[Need]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.config.objective.name

    def samples(self) -> list[str]:
        """What single samples don't have; where that is all or more than can be skipped it is refused."""
        notes = []
        for need in ordered(self.needs):
            missing = [row for row in self.rows if need.missing_in(row)]
            if missing and (len(missing) == len(self.rows) or not need.optional):
                raise need.refusal(self.name, _named(missing), len(self.rows))
            if missing:
                notes.append(f"{len(missing)} of {len(self.rows)} samples have no {need} and aren't drawn")
        return notes

    def groups(self, sizes: dict[str, int], *, drop: bool) -> list[str]:
        """Groups that are too small. `sizes`: responses, or pairs, of each group."""
        need = grouping(self.needs)
        if need is None:
            return []
        least = 1 if need == PAIRS else need.least
        small = [prompt for prompt, size in sizes.items() if size < least]
        if not small:
            return []
        if not drop:
            raise need.refusal(self.name, small, len(sizes), "groups")
        return [f"{len(small)} of {len(sizes)} groups don't have {need.what} and aren't drawn"]

    def responses(self) -> dict[str, int]:
        """By prompt the number of responses that can be drawn, where there are any."""
        data = self.config.data
        sizes = {}
        for group in self.store.groups(roles=data.roles, sources=data.sources):
            size = group.scored if REWARD in self.needs else group.size
            if size:
                sizes[group.prompt_id] = size
        return sizes

    def pairs(self) -> dict[str, int]:
        """By prompt the number of its pairs; raises `Refused` where there are none at all, or none with votes."""
        judged = pairs_among(self.rows, self.needs, self.store)
        pairs = [pair for of_group in judged.values() for pair in of_group]
        known = self.store.counts().pairs
        if not pairs:
            error = PAIRS.refusal(self.name, _named(self.rows), len(self.rows))
            if known:
                error = Refused(
                    f"{error} {known} pairs in {self.store.path} are of samples that data.roles and data.sources "
                    "exclude, of samples without a reward, or of two prompts."
                )
            raise error
        bare = [p for p in pairs if p.votes_winner is None or p.votes_loser is None]
        if VOTES in self.needs and bare:
            some = [f"sample {p.winner} over sample {p.loser}" for p in bare]
            raise VOTES.refusal(self.name, some, len(pairs), "pairs")
        if known > len(pairs):
            self.notes = (f"{known - len(pairs)} of {known} pairs aren't drawn",)
        return {row.prompt_id: len(judged.get(row.prompt_id, ())) for row in self.rows}


def pairs_among(rows: Sequence[Known], needs: Set[Need], store: Store) -> dict[str, list[Pair]]:
    """By prompt the judgements that join two of these samples, with rewards where these are needed."""
    prompt = {row.id: row.prompt_id for row in rows if row.scored or REWARD not in needs}
    out: dict[str, list[Pair]] = {}
    for pair in store.pairs():
        if pair.winner in prompt and prompt[pair.winner] == prompt.get(pair.loser):
            out.setdefault(prompt[pair.winner], []).append(pair)
    return out


def _named(rows: Sequence[Known]) -> list[str]:
    return [f"sample {row.id} (prompt {row.prompt_id})" for row in rows]
