"""`agro compare`: is B better than A, on the same prompts? Of runs their curves too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import answer, options, show_table, terminal
from agro.cli.run_models import MeasuredModel, load_sets
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.numbers import chance, fixed, none_if_nan
from agro.logs.results import Result, is_run, results_at
from agro.rewards import load_reward
from agro.store.location import url_of
from agro.types import Prompt

if TYPE_CHECKING:
    from agro.pages.run.compare import PairedSets


def compare(
    results: Annotated[list[str], typer.Argument(metavar="A B…")],
    metric: str | None = None,
    prompts: list[Path] | None = None,
    reward: str | None = None,
    option: list[str] | None = None,
    n: int = 8,
    max_new: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    policy: list[str] | None = None,
    out: Path = Path("compare"),
    as_json: bool = False,
) -> None:
    """Args:
    results: Runs, stores, files of agro eval --out, samples of lm-evaluation-harness, lighteval or
        Inspect (a file, or the folder of several tasks), other logs; with --prompts models. Each other
        one is compared with the first. Of runs those that differ in their seed alone are one line.
    metric: Of runs a number of metrics.jsonl, or else held-out reward; of a harness's one, such as
        exact_match,strict-match, or else the first that both have.
    prompts: A set of prompts, which the models (of runs: theirs) answer; again for each set.
    out: The folder of compare.html, and where all are runs of compare.png, .svg, .pdf and .csv.
    """
    paths = [Path(name) for name in results]
    if prompts is None and all(is_run(path) for path in paths):
        _compare_runs(paths, metric, out, as_json)
        return
    if len(results) < 2:
        raise Refused(f"compare: expected two results or more, or a run, got {results[0]} alone")
    if prompts is None:
        for path in [path for path in paths if not url_of(path)]:
            is_model = (path / "config.json").is_file() and not is_run(path)
            if is_model or not path.exists():
                what = "a model" if is_model else "no such file or folder"
                raise Refused(f"{path}: {what}: models are compared with --prompts FILE --reward NAME")
        sides = [results_at(path) for path in paths]
    else:
        if reward is None:
            raise Refused("--prompts: expected --reward NAME beside it, which scores the responses")
        sets, scoring = load_sets(prompts), RewardConfig(name=reward, options=options(option))
        sampling: dict[str, Any] = {"n": n, "temperature": temperature, "max_new": max_new}
        sides = [_answered(name, sets, scoring, policy, seed, **sampling) for name in results]
    from agro.pages.run.compare import PairedSets, write_results

    paired = PairedSets.of(sides, metric)
    written = [str(path) for path in write_results(paired, out)]
    if not as_json:
        _say(paired)
    answer({**paired.to_json(), "files": written}, "\n".join(written), as_json)


def _answered(
    name: str,
    sets: dict[str, list[Prompt]],
    reward: RewardConfig,
    policy: list[str] | None,
    seed: int,
    **sampling: Any,
) -> list[Result]:
    """Of a model, which answers sets of prompts; the result of a run is its model's, and a file or store of
    responses is read as it is. `sampling`: of `MeasuredModel.sampler`."""
    from agro.cli.eval_command import Measurement
    from agro.rollout.rollout import EpisodeReward

    path = Path(name)
    if path.is_file():
        return results_at(path)
    run, model = (path, None) if is_run(path) else (None, name)
    subject = MeasuredModel.of(run, model, policy)
    rollout = subject.rollout()
    scoring = reward.model_dump(mode="json", include={"name", "options"})
    found = []
    with closing(EpisodeReward(load_reward(reward))) as scorer:
        measurement = Measurement(scorer, subject.sampler(**sampling), seed)
        for task, prompts in sets.items():
            measured = measurement.of(rollout, subject.path, prompts)
            if measured.is_unknown:
                raise Refused(
                    f"{name}: none of the responses to {task} could be scored: "
                    f"{measured.errors[0] if measured.errors else 'the reward is unknown'}"
                )
            rows = [list(map(none_if_nan, row)) for row in measured.rewards.tolist()]
            rewards = dict(zip((p.id for p in prompts), rows, strict=True))
            texts = {prompt.id: prompt.text for prompt in prompts}
            found.append(Result.of_prompts(name, rewards, texts, task=task, scoring=scoring))
    return found


def _compare_runs(runs: list[Path], metric: str | None, out: Path, as_json: bool) -> None:
    from agro.pages.run import compare as pages

    comparison = pages.compare(runs, metric)
    paths = pages.write(comparison, out)
    if as_json:
        answer(pages.to_json(comparison, paths), "", as_json)
        return
    rows = []
    for line in comparison.lines:
        seeds, difference = ", ".join(map(str, line.seeds)), pages.difference_words(comparison, line)
        rows.append([line.label, seeds, pages.final_words(line), str(line.steps[-1]), difference])
    final = f"final {comparison.measure_name}"
    console = show_table(("line", "seeds", final, "step", "to the first line"), rows, wrap_names=True)
    if any(len(line.runs) >= pages.BANDS for line in comparison.lines):
        console.print("[…]: 95 % t-interval over seeds")
    differences = pages.differences_words(comparison) or ["nothing but the seed"]
    for text in ["", "what differs:", *differences, "", *pages.notes(comparison), ""]:
        console.print(text)
    if comparison.paired is not None:
        _say(comparison.paired)
    print("\n".join(map(str, paths)))


def _say(paired: PairedSets) -> None:
    """One comparison in sentences; of several a table, and the sentences of those that show a difference."""
    if len(paired.pairs) > 1:
        rows = []
        for pair in paired.pairs:
            x = pair.comparison
            difference = fixed(x.difference, signed=True)
            if x.low == x.low:
                difference += f" [{fixed(x.low, signed=True)}, {fixed(x.high, signed=True)}]"
            p = "unknown" if pair.p != pair.p else chance(pair.p).removeprefix("p ").removeprefix("= ")
            rows.append([pair.name, str(x.n), fixed(x.a), fixed(x.b), difference, p, pair.verdict.answer])
        titles = ("set", "prompts", "first", "other", "difference", "p", "verdict")
        show_table(titles, rows, wrap_names=True).print(
            f"[…]: 95 % interval of other − first; p: adjusted for {len(paired.pairs)} comparisons (Holm)\n"
        )
    console = terminal()
    for pair in paired.pairs:
        for text in (pair.sentence, *pair.notes):
            console.print(text)
    for note in paired.notes:
        console.print(f"Not compared: {note}")
    console.print("")
