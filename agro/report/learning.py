"""Sections of the page: did it learn, and did it stay near the reference?"""

from __future__ import annotations

import math

import numpy as np

from agro.report.curves import against_kl, kl_pairs, learning_curve, smoothing
from agro.report.experience import Experience
from agro.report.figures import COLOURS, MUTED, NARROW, SECOND, WIDE, Axis, Series, cut, draw
from agro.report.markup import UNKNOWN, aside, both, escape, facts, number, panel, table, tabs, unknown
from agro.report.metrics import Measured, RunData, Span, known

REFERENCES = {
    "start": "the weights at the start of the run",
    "phase": "the weights at the start of each phase, so KL is counted anew in each",
    "model": "another model",
    "ema": "a moving average of the policy's weights, so KL doesn't add up over the run",
    "periodic": "a copy of the policy renewed now and then, so KL doesn't add up over the run",
}


def learning(run: RunData, experience: Experience) -> str:
    panels = "".join(p for p in (_consistency(run), _fresh_consistency(run), _regret(run), _parts(run)) if p)
    return _curves(run, experience) + _phases(run) + (f'<div class="panels">{panels}</div>' if panels else "")


def _curves(run: RunData, experience: Experience) -> str:
    if not any(np.isfinite(run.column(name)).any() for name in ("reward_mean", "eval_reward")):
        return unknown("No reward was measured.")
    width = smoothing(len(run.rows))
    mean = f", running mean over {width} steps" if width > 1 else ""
    heldout = " Held-out: prompts that aren't trained on, ±1 standard error."
    said = f"Training: mean reward of the responses that a step trained on, whoever wrote them{mean}." + (
        heldout if run.heldout(0, run.spans[-1].ends) else ""
    )
    seen = Axis(experience.seen(run), "responses drawn")
    if experience.draws:
        by_samples = both(
            "Reward against responses drawn", *(learning_curve(run, s, axis=seen) for s in (WIDE, NARROW))
        )
        by_samples += f"<figcaption>{said} A response that was drawn again counts again.</figcaption>"
    else:
        by_samples = unknown(experience.problem or "The store holds no draw of this run.")
    if kl_pairs(run):
        by_kl = both("Reward against KL", *(against_kl(run, s) for s in (WIDE, NARROW)))
        by_kl += (
            "<figcaption>What reward was gained for how much change. Training: fresh responses, a dot for each few steps; held-out: "
            f"joined in the order of steps. The reference is {REFERENCES[run.config.policy.reference]}.</figcaption>"
        )
    else:
        by_kl = unknown("KL to the reference was not measured.")
    by_steps = both("Reward against steps", *(learning_curve(run, s) for s in (WIDE, NARROW)))
    by_steps += f"<figcaption>{said}</figcaption>"
    return "<figure>" + tabs("axis", {"steps": by_steps, "samples": by_samples, "KL": by_kl}) + "</figure>"


def _phases(run: RunData) -> str:
    if run.heldout(0, run.spans[-1].ends) is None:
        said = "There is no held-out reward: it takes data.eval_prompts, and a step that evaluates."
    else:
        said = (
            "Held-out reward before and after each phase ± one standard error over prompts. Both ends are measured on the same prompts, "
            "so that of a change, given as if they weren't, is rather too large."
        )
    return table([_phase(run, span) for span in run.spans]) + aside(said)


def _phase(run: RunData, span: Span) -> dict[str, str]:
    before, after = run.heldout(span.begins, span.begins), run.heldout(span.begins + 1, span.ends)
    change = UNKNOWN
    if before and after:
        change = number(after.value - before.value, "+.3f", math.hypot(before.se, after.se))
    config = run.config.phase(span.name) if span.name in run.config.phase_names else run.config
    options = ", ".join(f"{k} = {v}" for k, v in config.objective.options.items())
    data = {0.0: "fresh samples", 1.0: "from the store"}.get(
        config.data.replay, f"{config.data.replay:.0%} from the store"
    )
    steps = span.ends - span.begins
    return {
        "phase": escape(span.name),
        "objective": escape(config.objective.name) + aside(options) + aside(data),
        "steps": f"{steps}" + aside(f"of {config.train.steps}" if steps < config.train.steps else ""),
        "before": _measured(before),
        "after": _measured(after, span.ends),
        "change": change,
    }


def _measured(found: Measured | None, expected: int | None = None) -> str:
    if found is None:
        return UNKNOWN
    late = f"at step {found.step}" if expected not in (None, found.step) else ""
    return number(found.value, se=found.se) + aside(late)


def _consistency(run: RunData) -> str:
    """½ Var(R) on held-out stored groups, where the run was given any."""
    now, fall = run.column("eval_consistency"), run.column("eval_consistency_fall")
    if not np.isfinite(now).any():
        return ""
    last = np.flatnonzero(np.isfinite(now))[-1]
    row = run.rows[last]
    lines = [
        Series("reference", now + fall, MUTED, points=True),
        Series("policy", now, SECOND, run.column("eval_consistency_se"), points=True),
    ]
    fell = (
        ""
        if row.get("eval_consistency_fall") is None
        else (
            f" At step {row['step']} it was {row['eval_consistency_fall']:.4f}"
            + (
                ""
                if row.get("eval_consistency_fall_se") is None
                else f" ± {row['eval_consistency_fall_se']:.4f}"
            )
            + " below the reference's."
        )
    )
    caption = f"AGRO's loss on {row.get('eval_groups', '?')} stored groups that aren't trained on: lower is better, whoever wrote them.{fell}"
    return panel("Held-out ½ Var(R)", caption, draw(run, lines))


def _fresh_consistency(run: RunData) -> str:
    """½ Var(R) of the policy's own responses to held-out prompts, where there were several a prompt and a β."""
    found = run.column("eval_fresh_consistency")
    if not np.isfinite(found).any():
        return ""
    caption = (
        "Of the policy's own responses to held-out prompts, R = r − β log π/π_ref. It is 0 at the optimum, and also for a policy that always "
        "says the same, so read it beside the reward; from a policy that is seldom right it rises first."
    )
    line = Series("policy", found, SECOND, run.column("eval_fresh_consistency_se"), points=True)
    return panel("½ Var(R) of held-out responses", caption, draw(run, [line]))


def _regret(run: RunData) -> str:
    """Estimated regret on fresh and on held-out groups, where there were any and a β."""
    fresh, heldout = run.column("regret"), run.column("eval_regret")
    if not np.isfinite([fresh, heldout]).any():
        return ""
    caption = (
        "β log mean exp(R/β) − mean R in groups of the policy's own responses, R = r − β log π/π_ref: how far the regularised reward is below "
        "the best. Biased low, for few responses don't show the best; 0 would be the optimum."
    )
    lines = [
        Series("training", fresh, smooth=smoothing(len(run.rows))),
        Series("held-out", heldout, SECOND, run.column("eval_regret_se"), points=True),
    ]
    return panel("Estimated regret", caption, draw(run, lines, unit="reward"))


def _parts(run: RunData) -> str:
    """The parts of the reward, where it has several."""
    parts = [row.get("reward_parts") or {} for row in run.rows]
    names = list(dict.fromkeys(name for row in parts for name in row))
    if len(names) < 2:
        return ""
    width, shown = smoothing(len(run.rows)), names[: len(COLOURS)]
    lines = [
        Series(cut(name, 16), known([row.get(name) for row in parts]), colour, smooth=width)
        for name, colour in zip(shown, COLOURS, strict=False)
    ]
    more = len(names) - len(shown)
    left = f" {more} more {'is' if more == 1 else 'are'} in metrics.jsonl." if more else ""
    return panel("Parts of the reward", f"Mean of each over what a step trained on.{left}", draw(run, lines))


def nearness(run: RunData) -> str:
    training, heldout = run.training_kl, run.column("eval_kl_ref")
    anew = run.config.policy.reference == "phase"
    lines = [Series("training", training), Series("held-out", heldout, SECOND, points=True, split=anew)]
    measured = bool(np.isfinite(np.concatenate([training, heldout])).any())
    figure = panel(
        "KL to the reference",
        "Mean log-ratio of a whole response. Training: fresh responses; held-out: responses to held-out prompts.",
        draw(run, lines, unit="nats a response", scale="log") if measured else None,
    )
    betas = run.column("beta")
    if len(set(betas[np.isfinite(betas)])) > 1:
        figure += panel(
            "β",
            "What it was at each step, where it followed a schedule or the KL.",
            draw(run, [Series("β", betas)], unit="reward per nat"),
        )
    pull = run.column("pull_to_rewards")
    if np.isfinite(pull).any():
        figure += panel(
            "Pull against rewards",
            "How much β log π/π_ref differs within groups, in units of how much the rewards do there. 1 at the optimum (grey); far above it the "
            "rewards hardly count.",
            draw(
                run,
                [Series("optimum", np.ones_like(pull), MUTED), Series("pull", pull)],
                unit="ratio",
                scale="log",
            ),
        )
    last = next((row for row in reversed(run.rows) if row.get("eval_kl_ref") is not None), None)
    highest = run.rows[int(np.nanargmax(training))] if np.isfinite(training).any() else None
    policy = run.config.policy
    named = f": {policy.reference_model}" if policy.reference_model else ""
    return (
        f'<div class="panels">{figure}'
        + facts(
            {
                "reference": escape(REFERENCES[policy.reference] + named),
                "held-out KL at the end": None
                if last is None
                else number(last["eval_kl_ref"]) + aside(f"nats a response, step {last['step']}"),
                "highest KL in training": None
                if highest is None
                else number(highest["kl_ref"]) + aside(f"nats a response, step {highest['step']}"),
            }
        )
        + "</div>"
    )
