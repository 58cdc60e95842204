"""`agro rate`: a page on which a person compares the answers of a run's start and result, blind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agro.cli.blind import check_of, given, read_blind, write_blind
from agro.cli.common import PolicySetting, Seed
from agro.cli.models import MaxNew, Temperature
from agro.cli.run_models import START, MeasuredModel, load_sets
from agro.errors import Refused

SHEET = "rate.csv"  # in the run's folder
OF_SERVER = ("run", "port", "host")


def rate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run: its start, its model, its prompts.")],
    port: Annotated[int, typer.Option("--port", min=0, help="0: a free one.")] = 0,
    host: Annotated[
        str,
        typer.Option("--host", help="The address to listen at; 0.0.0.0: all, for a phone in your network."),
    ] = "127.0.0.1",
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="Prompts in place of the run's held-out ones; may be repeated."),
    ] = None,
    pairs: Annotated[
        int, typer.Option("--pairs", min=1, help="Prompts at most, chosen by a hash of their ids.")
    ] = 200,
    max_new: MaxNew = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    policy: PolicySetting = None,
) -> None:
    from agro.pages.run.rate import RateServer, Rating
    from agro.rollout.blind import read_key
    from agro.rollout.sequential import fewest_more
    from agro.runs.rundata import load_run
    from agro.runs.side_by_side import place

    sheet = run / SHEET
    if not sheet.exists():
        subject = MeasuredModel.of(run, None, policy)
        loaded = [p for read in load_sets(prompts).values() for p in read] if prompts else subject.held_out()
        asked = sorted(loaded, key=lambda prompt: place(prompt.id))[:pairs]
        print(f"sampling an answer of each model to {len(asked)} of {len(loaded)} prompts …", file=sys.stderr)
        least = fewest_more(0, 0)
        if len(asked) < least:
            print(f"note: {least} pairs decide at the earliest; --prompts FILE asks more", file=sys.stderr)
        seen = subject.seen(asked)
        if seen is not None:
            print(f"seen in training: {seen.sentence}", file=sys.stderr)
        rollouts = subject.other(START), subject.rollout()
        sampler = subject.sampler(1, temperature, max_new)
        write_blind(sheet, rollouts, asked, sampler, seed, (START, subject.name), run, "sequential")
        del rollouts  # which take memory that nothing needs while somebody rates
    else:
        changed = [f"--{name.replace('_', '-')}" for name in given(context) if name not in OF_SERVER]
        if changed:
            raise Refused(
                f"{', '.join(changed)}: {sheet} is there, which has its answers already; leave the options "
                f"out, or remove {sheet} and its key, with all ratings"
            )
    key, steps = read_key(sheet), load_run(run).steps
    check_of(run, sheet, key)
    if key["test"] != "sequential" or key["step"] != steps:
        raise Refused(
            f"{sheet}: expected answers of step {steps} that agro rate sampled, got step {key['step']} and "
            f"the test {key['test']}; remove it and its key, or give them another name"
        )
    rating = Rating(run, sheet, steps)
    with RateServer(rating, port, host) as server:
        print("each rating is kept at once; Ctrl-C ends this, the same command goes on", file=sys.stderr)
        server.serve_until_interrupted(f"serving {server.address}?token={server.token}")
    ratings = rating.ratings()
    if ratings.decided or not ratings.unrated:
        read_blind(run, sheet, as_json=False)
