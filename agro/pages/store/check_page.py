"""The page of `agro check`: one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import count, fixed, percent, short, with_error
from agro.pages.run.panels import present
from agro.pages.run.render import Fact, Panel, render
from agro.pages.store import check_figures as figures
from agro.pages.store.check_report import Report
from agro.pages.store.spread import Spread

ROWS = 12  # sources in the table


def write_page(report: Report, folder: Path) -> Path:
    """Write check.html and check.json into `folder`, which is made, and return the page's path."""
    if folder.exists() and not folder.is_dir():
        raise Refused(f"--out {folder}: expected a folder, got a file; give another path")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "check.html"
    write(path, page(report))
    write(folder / "check.json", json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n")
    return path


def page(report: Report) -> str:
    """The page as text."""
    return render(
        "check.html",
        report=report,
        facts=list(_facts(report)),
        groups=present(_groups(report)),
        sources=[_row(report, name) for name in report.sources[:ROWS]],
        more=max(0, len(report.sources) - ROWS),
        texts=present(_texts(report)),
        model_facts=list(_model_facts(report)),
        model=list(_model(report)),
        json=json.dumps(report.to_json(), ensure_ascii=False, indent=1),
    )


def _facts(report: Report) -> Iterator[Fact]:
    counts, survey = report.counts, report.survey
    yield Fact("responses", count(survey.responses), f"in {count(counts.groups)} groups, one a prompt")
    yield Fact("groups of one", count(survey.sizes[1]), bad=survey.sizes[1] > survey.groups / 2)
    if survey.scored_groups:
        share = survey.equal / survey.scored_groups
        yield Fact("groups of equal rewards", count(survey.equal), percent(share), bad=share > 0.5)
    yield Fact("groups with several sources", count(survey.mixed))
    ties = f"and {count(counts.ties)} ties" if counts.ties else ""
    yield Fact("judged pairs", count(counts.pairs), ties)
    yield Fact("without a reward", count(counts.unscored + counts.failed), f"{count(counts.failed)} failed")
    for name, part in (("tokens", counts.with_tokens), ("log-probs", counts.with_behavior)):
        yield Fact(f"{name} known", _share(part, counts.samples))
    yield Fact("version known", _share(survey.total("with_version"), counts.samples), "sampled by agro")


def _share(part: int, total: int) -> str:
    return percent(part / total) if total else "–"


def _row(report: Report, name: str) -> dict[str, Any]:
    source = report.survey.sources[name]
    return {
        "name": name or "(no name)",
        "role": ", ".join(sorted(source.roles)),
        "rows": source.rows,
        "rewards": source.rewards,
        "length": source.lengths.mean,
        "truncated": percent(source.truncated / source.ended) if source.ended else None,
        "behavior": _share(source.with_behavior, source.rows),
        "license": report.licenses.get(name),
    }


def _source_spreads(report: Report, name: str) -> dict[str, Spread]:
    """A spread of each source that has any values."""
    sources = report.survey.sources
    spreads = {key: getattr(sources[key], name) for key in report.sources}
    return {key: spread for key, spread in spreads.items() if spread.count}


def _groups(report: Report) -> Iterator[Panel | None]:
    survey = report.survey
    if survey.sizes:
        yield Panel(
            "Sizes of groups",
            "Responses to one prompt. One alone can't be compared.",
            figures.sizes(survey.sizes),
        )
    yield _panel("Rewards", "By source, all responses.", _source_spreads(report, "rewards"), "reward")
    yield _spread_panel(
        "Trajectory quality",
        "(mean − worst) / (best − worst) reward of each group with unequal rewards (TQ, arXiv 2111.04714). "
        "Near 1 imitation is enough; near 0 few responses show what is good.",
        survey.quality,
        "TQ",
    )
    yield _spread_panel(
        "Coverage",
        "Distinct responses per response, of each group (SACo). Near 0 the responses repeat each other.",
        survey.coverage,
        "SACo",
    )
    yield _spread_panel(
        "Coverage by final answers",
        "Distinct final answers per response (SACo). Far below the coverage above: different texts conclude "
        "the same.",
        survey.answers,
        "SACo",
    )


def _spread_panel(title: str, text: str, spread: Spread, unit: str) -> Panel | None:
    if not spread.count:
        return None
    text = f"{text} Mean {fixed(spread.mean)} of {count(spread.count)} groups."
    return Panel(title, text, figures.group_shares(spread, unit))


def _texts(report: Report) -> Iterator[Panel | None]:
    lengths = _source_spreads(report, "lengths")
    yield _panel("Lengths", "Of responses, in characters.", lengths, "characters", log=True)
    tokens = _source_spreads(report, "tokens")
    if tokens:
        yield _panel("Tokens", "Of responses whose tokens are stored.", tokens, "tokens", log=True)


def _panel(title: str, text: str, series: dict[str, Spread], unit: str, *, log: bool = False) -> Panel | None:
    if not series:
        return None
    more = len(series) - figures.MOST
    if more > 0:
        text += f" The {figures.MOST} largest sources; {more} more aren't shown."
    return Panel(title, text, figures.spreads(series, unit, title, log=log), figures.key(series))


def _model_facts(report: Report) -> Iterator[Fact]:
    if report.measured is None:
        return
    values = report.measured.to_json()
    of = f"{count(values['measured_groups'])} of {count(report.measured.total)} prompts"
    for reason, number in values["invalid"].items():
        yield Fact("left out", count(number), f"responses: {reason}")
    for kind, how in (values["template"] or {}).items():
        yield Fact(f"the chat template shows {kind}", how, "")
    yield Fact("log π of a token", short(values["logp_per_token"]), f"nats, {of}")
    if report.measured.against_reference:
        yield Fact("log π_ref of a token", short(values["ref_logp_per_token"]), "nats")
    auc = None if values["auc"] is None else with_error(values["auc"], values["auc_se"], 2)
    yield Fact(
        f"ranking (AUC of {values['auc_of']})", auc, f"{count(values['auc_groups'])} groups; 0.5 is chance"
    )
    coverage = short(values["policy_coverage"])
    yield Fact("coverage of π", coverage, "its probability on the stored responses to a prompt")
    ess = None if values["ess"] is None else percent(values["ess"], 1)
    yield Fact("effective sample size", ess, "of the responses with log-probs, weighted by π/μ")
    beta = values["beta"]
    if beta["groups"]:
        yield Fact(
            "balanced β", f"{beta['low']:.2g} to {beta['high']:.2g}", f"with {beta['of']}, middle half"
        )
    if values["ranked_pairs"]:
        yield Fact(
            "pairs ranked right", fixed(values["ranked_share"], 2), f"of {count(values['ranked_pairs'])}"
        )


def _model(report: Report) -> Iterator[Panel]:
    measured = report.measured
    if measured is None or not measured.groups:
        return
    per_token = measured.per_token
    if len(per_token["best"]):
        title = "Log π of a token"
        figure = figures.densities(per_token, "nats", title)
        text = "Mean over the tokens of a response: the best and the worst responses of each group."
        yield Panel(title, text, figure, figures.names(per_token))
    balance = measured.balance
    if len(np.unique(balance)) > 1:
        title = "Where rewards and log-ratios balance"
        figure = figures.densities({"": balance}, "β", title, log=True)
        text = (
            "The β of each group at which β times the log-ratio differs as much as its rewards. "
            "Below it the rewards lead, above it the reference."
        )
        yield Panel(title, text, figure)
