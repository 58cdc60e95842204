"""`agro compare`: is B better than A, on the same prompts? Of runs their curves too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import answer, options, show_table, terminal
from agro.cli.run_models import MeasuredModel, load_sets
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.numbers import chance, none_if_nan
from agro.logs.results import Result, is_run, results_at
from agro.rewards import load_reward
from agro.store.location import url_of
from agro.types import Prompt


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
    from agro.pages.run import compare as pages  # here: it imports what draws

    paths = [Path(name) for name in results]
    if prompts is None and all(is_run(path) for path in paths):
        _answer(pages.write(pages.compare(paths, metric), out), as_json)
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
    _answer(pages.write_results(pages.PairedSets.of(sides, metric), out), as_json)


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


def _answer(document: dict[str, Any], as_json: bool) -> None:
    """The document, or what it says of curves and of sets of prompts."""
    if not as_json:
        if "lines" in document:
            _say_curves(document)
        if document["sets"]:
            _say_sets(document)
    answer(document, "\n".join(document["files"]), as_json)


def _say_curves(document: dict[str, Any]) -> None:
    from agro.pages.run import compare as pages

    lines, rows = document["lines"], []
    for line in lines:
        seeds, difference = ", ".join(map(str, line["seeds"])), pages.difference_words(line, lines[0])
        rows.append([line["label"], seeds, pages.final_words(line), str(line["step"]), difference])
    final = f"final {pages.measure_name(document['measure'])}"
    console = show_table(("line", "seeds", final, "step", "to the first line"), rows, wrap_names=True)
    if any(len(line["runs"]) >= pages.BANDS for line in lines):
        console.print("[…]: 95 % t-interval over seeds")
    differences = pages.differences_words(document["differences"]) or ["nothing but the seed"]
    for text in ["", "what differs:", *differences, "", *document["notes"], ""]:
        console.print(text)


def _say_sets(document: dict[str, Any]) -> None:
    """One comparison in sentences; of several a table, and the sentences of those that show a difference."""
    from agro.pages.run.compare import sets_in_words

    sets, console = sets_in_words(document), terminal()
    if len(sets) > 1:
        rows = []
        for found in sets:
            p = found["row"]["p"]
            shown = "unknown" if p is None else chance(p).removeprefix("p ").removeprefix("= ")
            rows.append([*found["cells"], shown, found["row"]["verdict"]])
        titles = ("set", "prompts", "first", "other", "difference", "p", "verdict")
        show_table(titles, rows, wrap_names=True).print(
            f"[…]: 95 % interval of other − first; p: adjusted for {len(sets)} comparisons (Holm)\n"
        )
    for found in sets:
        for text in (found["sentence"], *found["notes"]):
            console.print(text)
    for note in document["not_compared"]:
        console.print(f"Not compared: {note}")
    console.print("")
