"""`agro compare`: compare results on the same prompts, and the curves of runs."""

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
        Inspect (a file, or the folder of several tasks), other logs; with --prompts also models. Each is
        compared with the first. Runs that differ only in their seed form one line.
    metric: For runs, a metric of metrics.jsonl (default: held-out reward); for a harness, one of its
        metrics, such as exact_match,strict-match (default: the first that both have).
    prompts: A set of prompts for the models, or the runs' models, to answer; may be repeated.
    out: The folder of compare.html, and for runs of compare.png, .svg, .pdf and .csv.
    """
    from agro.pages.run import compare as pages  # here: it imports matplotlib

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
                kind = "a model" if is_model else "no such file or folder"
                raise Refused(f"{path}: {kind}: models are compared with --prompts FILE --reward NAME")
        sides = [results_at(path) for path in paths]
    else:
        if reward is None:
            raise Refused("--prompts: expected --reward NAME with it, to score the responses; got none")
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
    """Let a model, or a run's model, answer sets of prompts; read a file or store of responses as it is.
    `sampling`: arguments of `MeasuredModel.sampler`."""
    from agro.cli.eval_command import Measurement
    from agro.rollout.rollout import EpisodeReward

    path = Path(name)
    if path.is_file():
        return results_at(path)
    run, model = (path, None) if is_run(path) else (None, name)
    subject = MeasuredModel.of(run, model, policy)
    rollout = subject.rollout()
    scoring = reward.model_dump(mode="json", include={"name", "options"})
    results = []
    with closing(EpisodeReward(load_reward(reward))) as scorer:
        measurement = Measurement(scorer, subject.sampler(**sampling), seed)
        for task, prompts in sets.items():
            measured = measurement.of(rollout, subject.path, prompts)
            if measured.is_unknown:
                raise Refused(
                    f"{name}: no response to {task} could be scored: "
                    f"{measured.errors[0] if measured.errors else 'the reward is unknown'}"
                )
            rows = [list(map(none_if_nan, row)) for row in measured.rewards.tolist()]
            rewards = dict(zip((p.id for p in prompts), rows, strict=True))
            texts = {prompt.id: prompt.text for prompt in prompts}
            results.append(Result.of_prompts(name, rewards, texts, task=task, scoring=scoring))
    return results


def _answer(document: dict[str, Any], as_json: bool) -> None:
    """Print the document, or its curves and its comparisons as text."""
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
        console.print("[…]: 95% t-interval over seeds")
    differences = pages.differences_words(document["differences"]) or ["nothing but the seed"]
    for text in ["", "what differs:", *differences, "", *document["notes"], ""]:
        console.print(text)


def _say_sets(document: dict[str, Any]) -> None:
    """Print one comparison as sentences, or several as a table with sentences on those that differ."""
    from agro.pages.run.compare import sets_in_words

    sets, console = sets_in_words(document), terminal()
    if len(sets) > 1:
        rows = []
        for comparison in sets:
            p = comparison["row"]["p"]
            shown = "unknown" if p is None else chance(p).removeprefix("p ").removeprefix("= ")
            rows.append([*comparison["cells"], shown, comparison["row"]["verdict"]])
        titles = ("set", "prompts", "first", "other", "difference", "p", "verdict")
        show_table(titles, rows, wrap_names=True).print(
            f"[…]: 95% interval of other − first; p: adjusted for {len(sets)} comparisons (Holm)\n"
        )
    for comparison in sets:
        for text in (comparison["sentence"], *comparison["notes"]):
            console.print(text)
    for note in document["not_compared"]:
        console.print(f"Not compared: {note}")
    console.print("")
