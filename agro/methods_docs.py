"""Makes docs/methods.md, all objectives by paper, from their entries: `python -m agro.methods_docs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from agro.objectives import OBJECTIVES, Objective
from agro.proof.claims import CLAIMS

HEAD = """# Methods by paper

Made by `python -m agro.methods_docs`. Each is an objective: `objective.name = "NAME"`, with a recipe
of its name: `agro train NAME`, and `agro recipes NAME` prints it. `agro objectives NAME` gives its equation
and options, `agro prove NAME` what is proved of it.

*Reaches π\\** says on which samples descent on the exact expected gradient ends at the optimal policy
π_ref exp(r/β)/Z: on *any* samples with full support, whoever wrote them, or on *fresh* ones. "no" is for
methods that end elsewhere, mostly because they have no reference; "–": nothing is claimed. *Equation* says
where it was read: in the authors' or the named library's code, in the paper, in notes that quote it, or
reconstructed from the abstract.

| arXiv | method | name here | needs | reaches π* | equation | called elsewhere |
|---|---|---|---|---|---|---|
"""
RULES = {
    "adaptive replay buffer, ARB (2512.10510)": '`data.order = "closest"`',
    "age weights of replay, AILBoost (2404.08513)": '`data.order = "age_weighted"`, `data.age_decay`',
    "β tuned to a target KL by dual ascent, as in SAC (1812.05905)": (
        "`objective.beta = {start, target_kl, rate}`"
    ),
    "best of n, Async RLHF (2410.18252)": "`sft` with `data.best_of_group = true`",
    "dynamic sampling, DAPO (2503.14476)": "`data.spread = true`",
    "experience-replayable conditions (2402.10374)": (
        "`data.max_drift` for the second; `topr`, `asymre` or `weight` bound what is pushed down, the first"
    ),
    "layer-skipped behavior, Nested-ReFT (2508.10123)": "`sampler.skip_layers`, `nested_reft`",
    "middle band, BFS-Prover-V2 (2509.06493)": "`middle_band`",
    "overlong penalty, DAPO (2503.14476)": '`reward.functions` with `name = "overlong"`',
    "propagated rewards of a search, SOPHIA (2507.16814)": (
        "`agro.rewards.groups.propagate`, recipe `sophia`"
    ),
    "replay and reincarnation, ReMix (2507.06892)": "two phases, recipe `remix`",
    "residual RL, an adapter on a frozen base in 50/50 batches (2509.19301)": "recipe `residual`",
    "reward-conditioned imitation, MBRCSL (2310.19308)": "`reward_conditioned`, recipe of this name",
    "speculative decoding with the target's log-probs (2211.17192)": "`sampler.draft`",
    "token rewards of a flow network, RLFR (2510.10201)": "`agro.flow`, for stored samples",
    "tracked baseline V̂(x) for groups of one, SPO (2509.13232)": (
        "`data.value_half_life`, recipe `one_response`"
    ),
}
NOT_CARRIED = {
    "HNPG (arXiv 2311.08384)": (
        "not an objective: its offline states join the prompts that are sampled from, and offline "
        "responses only train a critic, which isn't here"
    ),
    "OORL (arXiv 2505.12723)": (
        "its sum of REINFORCE++ and GEPO is no entry; an objective of one's own adds two others in ten "
        "lines (guide, Choosing β and the method)"
    ),
    "GDPO (arXiv 2601.05242)": (
        "normalizes each part of a reward by itself: a batch has one reward a response"
    ),
    "PROPS (arXiv 2311.08290)": (
        "trains a second policy that samples what the store lacks; an engine samples one policy"
    ),
    "OTR, sampled": "`otr` has the closed form; the trainer doesn't draw K tokens at each position",
    "RLFR (arXiv 2510.10201)": (
        "`agro.flow` writes token rewards into a store; fresh samples of a run get none"
    ),
    "Guide's and AMPO's second sampling": (
        "hints and teachers are taken from the store; a run doesn't sample again with a hint"
    ),
    "periodic retraining (BFS-Prover-V2)": (
        "two runs: `policy.model` of the second is the first model again"
    ),
    "PMOE (arXiv 2104.09122)": "a mixture of adapters needs a forward pass for each, and a router in π",
    "Lipschitz reward models (arXiv 2006.16785)": "no reward model is trained here",
    "OPA-DPO's image terms": "text alone",
    "model-based VIPO, MP1, VolleyBots, ARIES, arXiv 2211.05311": (
        "no world model, nothing to carry over, or no method of training"
    ),
}
SYSTEMS = """
## Rules and systems

What isn't an objective: how samples are made, chosen and scored. Settings are explained in
[Configuration](configuration.md).

| method, arXiv | here |
|---|---|
"""
TAIL = """
## Not carried over

| method | why |
|---|---|
"""
NUMBER = re.compile(r"\d{4}\.\d{5}")


def methods() -> str:
    """The page, as Markdown."""
    rows = [row for name, entry in OBJECTIVES.items() for row in _rows(name, entry)]
    table = "\n".join(row for _, row in sorted(rows)) + "\n"
    return HEAD + table + SYSTEMS + _pairs(RULES) + TAIL + _pairs(NOT_CARRIED)


def _pairs(rows: Mapping[str, str]) -> str:
    return "".join(f"| {name} | {what} |\n" for name, what in rows.items())


def _rows(name: str, entry: Objective) -> list[tuple[str, str]]:
    """A row for each paper of an entry, with what it is sorted by."""
    rows = []
    for paper in entry.source.split("; "):
        found = NUMBER.search(paper)
        number = found[0] if found else ""
        title = re.sub(r",? ?arXiv \d{4}\.\d{5}", "", paper)
        link = f"[{number}](https://arxiv.org/abs/{number})" if number else "–"
        cells = (link, title, _name(name, entry), _needs(entry), _reaches(name), entry.certainty)
        called = entry.called.replace("|", "\\|") or "–"
        rows.append((number or "9", f"| {' | '.join(cells)} | {called} |"))
    return rows


def _name(name: str, entry: Objective) -> str:
    if not entry.of:
        return f"`{name}`"
    options = ", ".join(f"`{key} = {value!r}`" for key, value in entry.preset.items())
    return f"`{name}`: `{entry.of}`" + (f" with {options}" if options else "")


def _needs(entry: Objective) -> str:
    return ", ".join(sorted(entry.needed({}))) or "texts alone"


def _reaches(name: str) -> str:
    """On which samples some claim of the objective has descent end at the optimum."""
    needs = [claims.needs for claims in CLAIMS[name] if claims.ends == "optimum"]
    regularized = " with β > 0" if OBJECTIVES[name].defaults().get("beta") == 0 else ""
    if any("fresh" not in of_claim for of_claim in needs):
        return f"any{regularized}"
    if needs:
        return f"fresh{regularized}"
    return "no" if any(claims.ends == "elsewhere" for claims in CLAIMS[name]) else "–"


if __name__ == "__main__":
    Path("docs/methods.md").write_text(methods(), encoding="utf-8")
