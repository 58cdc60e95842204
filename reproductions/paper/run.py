"""The paper's figures 2 to 6, and what it promises beyond them, on a model that fits any machine.

    python reproductions/paper/run.py --all [--out runs/paper] [--record] [--small]
    python reproductions/paper/run.py offline fresh

The parts: `offline`, `single` and `long` (figure 5), `replay` (figure 4), `lag`, `fresh` (figures 2 and 3),
`beta` (figure 6). Their table is `experiments.py`: methods, data, and sentences, each with its rule. A model
of 0.2 million parameters sorts digits carelessly; many runs are made in lockstep.

Of each method on each data all settings are run with one seed; the best by accuracy on the prompts for
validation is run with two more. Where their mean is below what the next settings reached with one seed,
these are run with all seeds too. Sentences that three seeds leave open get twelve more. Results are of other
prompts. An interrupted command continues. Writes result.json and each part's figure as SVG into
`--out`, with `--record` beside this script too, with the tables in README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.errors import Refused  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.paper import drawing, report  # noqa: E402
from reproductions.paper.experiments import PARTS, Part  # noqa: E402
from reproductions.paper.rules import Found  # noqa: E402
from reproductions.paper.runs import Run, complete  # noqa: E402


def made(part: Part, out: Path, *, small: bool) -> list[Run]:
    """All runs of a part: on each plan its grid, then the other seeds of what is best, until that stays it;
    and more seeds where these leave a sentence open."""
    runs: list[Run] = []
    for plan in part.plans:
        trials = part.grid(plan)
        new, of_plan = trials, []
        while new:
            of_plan = complete(trials, out, small=small)
            new = [trial for trial in part.repeats(plan, of_plan) if trial not in trials]
            trials += new
        runs += of_plan
    return runs if small else runs + complete(part.more(runs), out, small=False)


def tables(runs: Mapping[str, list[Run]]) -> tuple[dict[str, Found], str]:
    """What each part found, and the tables of README.md."""
    found = {name: PARTS[name].found(of_part) for name, of_part in runs.items()}
    cost = {name: (len(of), sum(run["cpu_seconds"] for run in of)) for name, of in runs.items()}
    return found, report.tables(found, cost)


def recorded(out: Path, runs: dict[str, list[Run]], *, beside: bool) -> None:
    """Verdicts, tables and figures of the parts that are complete."""
    found, text = tables(runs)
    shown = [
        {"part": part.name, **sentence.claim._asdict(), "on": sentence.on, "whose": sentence.whose}
        | {"verdict": verdict.word, "measured": verdict.why}
        for part, sentence, verdict in report.judged(found)
    ]
    short = json.loads(json.dumps(runs), parse_float=lambda digits: round(float(digits), 6))
    result = {"machine": harness.machine(), "verdicts": shown, "runs": short}
    for folder in (out, *((HERE,) if beside else ())):
        (folder / "result.json").write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, figure in report.figures(found).items():
            drawing.save(figure, folder, name)
    if beside:
        harness.put(HERE / "README.md", text)
    print(text, report.others(found), sep="\n\n")


def main(arguments: Sequence[str] | None = None) -> None:
    anew = {"all": "all parts", "tables": "write the tables of what is recorded anew"}
    more = {"record": harness.RECORD, "small": harness.SMALL}
    parser = harness.parser(__doc__, "runs/paper", **anew, **more)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}")
    args = parser.parse_args(arguments)
    if args.tables:
        runs = json.loads((HERE / "result.json").read_text())["runs"]
        harness.put(HERE / "README.md", tables(runs)[1])
        return
    unknown = [word for word in args.parts if word not in PARTS]
    if unknown or not (args.parts or args.all):
        raise Refused(f"expected --all or some of {', '.join(PARTS)}; got {', '.join(unknown) or 'nothing'}")
    chosen = [part for part in PARTS.values() if args.all or part.name in args.parts]
    runs = {part.name: made(part, args.out, small=args.small) for part in chosen}
    recorded(args.out, runs, beside=args.record)


if __name__ == "__main__":
    harness.guarded(main)
