"""Makes docs/methods.md, all objectives by paper, from their entries: `python tools/docs/methods_docs.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from agro.config.recipes import recipes
from agro.io import peers
from agro.objectives import Objective, get
from agro.objectives.table import entries
from agro.proof.claims import claims_of

HEAD = """# Methods by paper

Made by `python tools/docs/methods_docs.py`. Each method is an objective, `objective.name = "NAME"`, with a
recipe of the same name: `agro train NAME` trains it, `agro recipes NAME` prints it, `agro objectives NAME`
gives its equation and options, and `agro prove NAME` checks what is claimed about it.

*Reaches π\\** says on which samples descent on the exact expected gradient ends at the optimal policy
π_ref exp(r/β)/Z: on *any* samples with full support, whoever wrote them, or on *fresh* ones. "no" means that
it ends elsewhere, usually because the method has no reference; if the end is a policy with a closed form,
the form follows, with μ the policy that wrote the samples. "–" means that nothing is claimed. *Equation* says
where it was read: in the authors' or the named library's code, in the paper, in notes that quote it, or
reconstructed from the abstract.

*Of its system* is "whole" if the recipe does what the paper is about, including how samples are
generated, and "the loss" or "the rule" if only this part is here, with what is missing.
`python reproductions/systems/run.py` measures the effect of the mechanisms.

| arXiv | method | name here | of its system | needs | reaches π* | equation | called elsewhere |
|---|---|---|---|---|---|---|---|
"""
RULES = {
    "adaptive replay buffer, ARB (2512.10510)": '`data.order = "closest"`, recipe `arb`',
    "adversarial imitation with a discriminator and age weights, AILBoost (2404.08513)": (
        'source `adversary` with `data.order = "age_weighted"`, recipe `ailboost`'
    ),
    "β tuned to a target KL by dual ascent, as in SAC (1812.05905)": (
        "`objective.beta = {start, target_kl, rate}`, recipe `tuned_beta`"
    ),
    "best-first search, BFS-Prover-V2 (2509.06493)": (
        'source `tree_search` with `by = "best"`, recipe `bfs_prover`'
    ),
    "off-policy evaluation from a log by propensities, ad-load balancing (2309.11518)": (
        "metric `eval_logged_gain`, with how many responses count (`eval_logged_gain_ess`)"
    ),
    "best of n, Async RLHF (2410.18252)": "`sft` with `data.best_of_group = true`",
    "cross-entropy of an environment's answers, ECHO (2605.24517)": "`objective.observations`, recipe `echo`",
    "distillation of a teacher's texts by a discriminator, GAD (2511.10643)": (
        'source `adversary` with `loss = "pairs"`, recipe `gad`'
    ),
    "dynamic sampling, DAPO (2503.14476)": "`data.spread = true`, recipe `dapo`",
    "ends of objectives without ratios, which are closer to μ than they seem (2605.28150)": (
        "`agro prove kimi`"
    ),
    "equivalence by a function, GEPO and OORL (2505.12723)": "`reward.meaning`, recipes `gepo` and `oorl`",
    "experience replay, first in first out (2604.08706)": '`data.order = "uniform"` with `data.max_age`',
    "experience-replayable conditions (2402.10374)": (
        "`data.max_drift` and an objective that bounds what is pushed down, recipe `erc`"
    ),
    "hints when all fail, Guide (2506.13923)": 'source `resample` with `by = "hint"`, recipe `guide`',
    "kept sets of top-p and top-k in ratios, DeepSeek-V3.2 (2512.02556)": "`sampler.keep_sets`",
    "imitation with a bounded slope of the discriminator, Lipschitz GAIL (2006.16785)": (
        "source `adversary` with a `penalty`, recipe `gail`"
    ),
    "logged response with fresh ones, as in ABPO (2605.18899)": (
        "`data.complete_groups`, recipe `complete_groups`"
    ),
    "layer-skipped behavior, Nested-ReFT (2508.10123)": "`sampler.skip_layers`, recipe `nested_reft`",
    "inverse RL, the reward of demonstrations (2310.06147)": "source `adversary`, recipe `inverse_rl`",
    "middle band, BFS-Prover-V2 (2509.06493)": "recipe `middle_band`",
    "overlong penalty, DAPO (2503.14476)": '`reward.functions` with `name = "overlong"`, recipe `dapo`',
    "periodic restart, BFS-Prover-V2 (2509.06493)": '`train.start = "first"`, recipe `bfs_prover`',
    "propagated rewards of a search, SOPHIA (2507.16814)": (
        'source `resample` with `by = "parents"`, recipe `sophia`'
    ),
    "what a log must cover, realizability (2211.05311)": (
        "`agro check` with a model: coverage of π, effective responses, and concentrability E_μ (π/μ)²"
    ),
    "quality and coverage of a log, TQ and SACo (2111.04714)": "`agro check`",
    "ranking accuracy of preferences (2405.19534)": (
        "metric `ranked_share` of objectives on pairs; of held-out ones `agro check` with a model"
    ),
    "replay and reincarnation, ReMix (2507.06892)": "two phases, recipe `remix`",
    "replay by age and reward, FreshPER (2604.16918)": (
        '`data.reward_power` with `data.order = "age_weighted"`, recipe `freshper`'
    ),
    "residual RL, an adapter on a frozen base in 50/50 batches (2509.19301)": "recipe `residual`",
    "reward-conditioned imitation of stitched responses, MBRCSL (2310.19308)": (
        'source `tree_search` with `by = "ucb"` and `explore = 0`, recipe `mbrcsl`; of a log alone, recipe '
        "`reward_conditioned`"
    ),
    "sampler of what the store lacks, PROPS (2311.08290)": (
        "source `props`, recipe `adaptive_sampling`; a run of its own, recipe `props`"
    ),
    "SharpeRatio@k of a ranking of policies by their estimates (2311.18207)": (
        "reproductions/systems, of a ranking by `agro.stats.off_policy`"
    ),
    "self-play against the iterate before, SPIN (2401.01335)": (
        'source `rivals` with `policy.reference = "sampler"` and `source.sync_every`, recipe `self_play`'
    ),
    "rival and reference from a random earlier version, SePPO (2410.05255)": (
        'source `rivals` with `policy.reference = "sampler"`, `source.sync_every` and `source.sync_from`, '
        "recipe `seppo`"
    ),
    "speculative decoding with a draft that is trained on-policy (2410.03804)": (
        "source `trained_draft`, recipe `trained_draft`"
    ),
    "speculative decoding with the target's log-probs (2211.17192)": "engine `drafted`, recipe `speculative`",
    "step-level pairs of a search, Agent Q (2408.07199)": (
        'source `tree_search` with `by = "ucb"`, `agro_papers.tree_search.step_pairs`, recipe `agent_q`'
    ),
    "teachers on demand, AMPO (2510.02227)": 'source `resample` with `by = "store"`, recipe `ampo`',
    "token rewards of a flow network, RLFR (2510.10201)": (
        "source `flow_reward`, recipe `rlfr`; of stored responses `agro_papers.flow_reward`"
    ),
    "tracked baseline V̂(x) for groups of one, uncertain prompts first, SPO (2509.13232)": (
        '`data.value_half_life`, `data.prompt_order = "uncertain"`, `normalize` of `rloo`, recipe '
        "`one_response`"
    ),
}
UNREAD = {"2605.18899": "its text. Only others' descriptions of it were available."}
# Reasons why methods, or parts of methods, aren't here.
NOT_CARRIED = {
    "DPO with images, OPA-DPO (2501.09695)": "text alone",
    "FPA (2509.19893)": (
        "its code isn't published: the extrapolation and the constant weights were known only from notes, "
        "and an implementation of these, with rewards in place of judgments, ended below the default on "
        "logs (reproductions/panel)"
    ),
    "mean shifted by β (2605.28150)": (
        "its text wasn't read: the abstract and a summary, which don't give the sign of the shift"
    ),
    "Missing old logits (2605.12070)": (
        "ratios to the trainer's own log-probs of the version that sampled, from a copy of its weights or a "
        "second model, or to an average of the weights (PPO-EWMA). `decoupled_ppo` uses the log-probs at the "
        "time the batch is drawn, of a later version if samples are stale; agro keeps no copy per version. "
        "Only its first page was read, not its equations; the authors' stored code has no average"
    ),
    "Mixture of Attentions for drafts (2410.03804)": (
        "an architecture of draft models; the engine `drafted` takes a causal language model, which "
        "the source `trained_draft` trains as the policy learns"
    ),
    "PMOE, a mixture of adapters (2104.09122)": (
        "π is then a sum over adapters: a forward pass for each at every token, a router in the model, and "
        "another engine"
    ),
    "SDFT (2601.19897)": (
        "its teacher is the policy with a demonstration in the prompt; the teacher of `distill` reads the "
        "same tokens as the policy"
    ),
    "ReVal (2603.23355)": (
        "`tbrm` less the reference's V, the log of the sum of exp of its logits at the first token. A pass "
        "of the reference gives log-probs, and no such sum. Summaries were read, and the equation where "
        "others quote it"
    ),
    "VAPO (2504.05118)": (
        "λ that grows with a response's length, and a value that is trained before the policy; its two λ are "
        "`gae_lambda` of `ppo`. Described from memory, not looked up"
    ),
    "TRL's ORPO, CPO, SimPO, XPO, Nash-MD, BCO, SPPO, AOT, EXO, NCA and DiscoPOP, verl's clip-cov, KL-cov "
    "and pass@k": (
        "not written: baselines of others that no paper this project is built from compares with; "
        "your own objective is ten lines (guide, Plug-ins)"
    ),
    "model-based VIPO, MP1 (2507.10543), VolleyBots (2502.01932), ARIES (2502.21208)": (
        "they need a world model, have nothing to carry over, or aren't training methods"
    ),
    "ReOPD (2607.04763)": "a variant of `distill` for samples of an earlier policy; no text was read",
}
SYSTEMS = """
## Rules and systems

Methods that aren't objectives: how samples are made, chosen and scored. [Configuration](configuration.md)
and [options](options.md) explain the settings.

| arXiv | method | here | of its system |
|---|---|---|---|
"""
TAIL = """
## Not carried over

| arXiv | method | why |
|---|---|---|
"""
NUMBER = re.compile(r"\d{4}\.\d{5}")
RECIPE = re.compile(r"recipe `(\w+)`")

PEERS = """
## Names of TRL and verl

Options and settings as of TRL 1.16 and verl 0.9.1. The
column *called elsewhere* above has their names of methods.

| theirs | here |
|---|---|
"""


def methods() -> str:
    """The page, as Markdown."""
    rows = [row for name, entry in entries().items() for row in _rows(name, entry)]
    table = "\n".join(row for _, row in sorted(rows)) + "\n"
    rules = {}
    for name, what in RULES.items():
        unread = UNREAD.get(NUMBER.findall(name)[0], "")
        rules[name] = f"{what} | {_extent(RECIPE.findall(what), 'the rule', unread)}"
    return HEAD + table + SYSTEMS + _pairs(rules) + TAIL + _pairs(NOT_CARRIED) + _peers()


def _pairs(rows: Mapping[str, str]) -> str:
    """Rows sorted by the first paper number of each, those without one last."""
    sorted_rows = sorted(rows.items(), key=lambda row: (NUMBER.findall(row[0]) or ["9"])[0])
    return "".join(f"| {_link(name)} | {_title(name)} | {what} |\n" for name, what in sorted_rows)


def _peers() -> str:
    """The table of TRL's and verl's options and settings, grouped by ours."""
    theirs: dict[str, list[str]] = {}
    for name, ours in {**peers.ALIASES, **peers.SETTINGS}.items():
        theirs.setdefault(ours.removesuffix(","), []).append(f"`{name}`")
    return PEERS + "".join(f"| {', '.join(names)} | {ours} |\n" for ours, names in theirs.items())


def _extent(names: Sequence[str], part: str, more: str = "") -> str:
    """How much of their systems recipes implement: "whole", or the part that is here and what is missing.
    `more`: what is missing and no recipe says."""
    known = recipes()
    missing = " ".join(filter(None, (*(known[name].missing for name in names), more)))
    return f"{part}. Missing: {missing}" if missing else "whole"


def _link(text: str) -> str:
    """A link to the first paper that a text names."""
    found = NUMBER.search(text)
    return f"[{found[0]}](https://arxiv.org/abs/{found[0]})" if found else "–"


def _title(text: str) -> str:
    """The text without the number that `_link` shows."""
    return re.sub(r",? ?(arXiv \d{4}\.\d{5}|\(\d{4}\.\d{5}\))", "", text, count=1)


def _rows(name: str, entry: Objective) -> list[tuple[str, str]]:
    """A row for each paper of an entry, with its sort key."""
    rows = []
    for paper in entry.source.split("; "):
        here = _extent([name], "the loss")
        cells = (_link(paper), _title(paper), _name(name, entry), here, _needs(entry), _reaches(name))
        called = entry.called.replace("|", "\\|") or "–"
        number = (NUMBER.findall(paper) or ["9"])[0]
        rows.append((number, f"| {' | '.join(cells)} | {entry.certainty} | {called} |"))
    return rows


def _name(name: str, entry: Objective) -> str:
    if not entry.of:
        return f"`{name}`"
    options = ", ".join(f"`{key} = {value!r}`" for key, value in entry.preset.items())
    return f"`{name}`: `{entry.of}`" + (f" with {options}" if options else "")


def _needs(entry: Objective) -> str:
    return ", ".join(sorted(entry.needed({}))) or "texts alone"


def _reaches(name: str) -> str:
    """The samples on which, by some claim, descent of the objective ends at the optimum."""
    needs = [claims.needs for claims in claims_of(name) if claims.ends == "optimum"]
    regularized = " with β > 0" if get(name).defaults().get("beta") == 0 else ""
    if any("fresh" not in of_claim for of_claim in needs):
        return f"any{regularized}"
    if needs:
        return f"fresh{regularized}"
    ends = [claims.end.name for claims in claims_of(name) if claims.end is not None]
    if ends:
        return f"no: {ends[0]}"
    return "no" if any(claims.ends == "elsewhere" for claims in claims_of(name)) else "–"


if __name__ == "__main__":
    Path("docs/methods.md").write_text(methods(), encoding="utf-8")
