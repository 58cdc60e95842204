"""A made-up run: what `agro train` would have written for phases sft, onpolicy, store."""

import json
import math
import random

from writing import write_rows

CONFIG = {
    "policy": {"new": {"alphabet": "0123456789+=#,", "hidden": 96, "layers": 3, "heads": 4, "context": 64}},
    "data": {"prompts": "data/train.jsonl", "eval_prompts": "data/held_out.jsonl"},
    "sampler": {"n": 8, "max_new": 24},
    "reward": {"name": "exact"},
    "train": {"seed": 3},
    "phases": [
        {
            "name": "sft",
            "objective": {"name": "sft"},
            "train": {"steps": 60, "lr": 1e-3},
            "data": {"replay": 1.0},
        },
        {"name": "onpolicy", "objective": {"name": "agro", "beta": 0.01}, "train": {"steps": 120}},
        {
            "name": "store",
            "objective": {"name": "agro", "beta": 0.05},
            "train": {"steps": 40},
            "data": {"replay": 1.0},
        },
    ],
    "versions": {"agro": "0.1.0", "torch": "2.13.0"},
    "run": "0123456789abcdef",
}


def rows():
    noise = random.Random(0)
    reward = 0.02
    for step in range(221):
        phase = "sft" if step <= 60 else "onpolicy" if step <= 180 else "store"
        if phase == "onpolicy":
            reward += 0.006 * (1.1 - reward)
        elif phase == "store":
            reward += 0.003 * (1.1 - reward)
        else:
            reward += 0.006
        row = dict.fromkeys(
            ["reward_mean", "eval_reward", "eval_reward_se", "eval_n", "kl_ref", "eval_kl_ref"]
        )
        row |= {"step": step, "phase": phase, "version": step}
        if step:
            fresh = phase == "onpolicy"
            norm = math.exp(noise.gauss(0.3 if phase == "sft" else -1.2, 0.5))
            row |= {
                "reward_mean": 1.0 if phase == "sft" else min(1.0, max(0.0, reward + noise.gauss(0, 0.05))),
                "loss": noise.random(),
                "grad_norm": norm,
                "grad_norm_clipped": min(1.0, norm),
                "lr": 1e-4,
                "kl_ref": 0.01 * (step - 60) + noise.gauss(0, 0.05) if fresh else None,
                "tokens": 1800,
                "sampled_tokens": 1500 if fresh else 0,
                "seconds": 0.9,
                "seconds_sample": 0.4,
                "seconds_train": 0.5,
                "staleness_mean": None if phase == "sft" else 0.0 if fresh else 60 + noise.random(),
                "staleness_max": None if phase == "sft" else 0.0 if fresh else 110.0,
                "length_mean": 14 + noise.gauss(0, 0.4),
                "truncated_share": 0.03 * noise.random() if fresh else None,
                "groups": 16,
                "groups_equal": noise.randrange(9),
                "no_signal": None,
                "replay_missing": 0,
                "rewards_failed": int(step == 100),
                "requests_failed": 0,
                "dropped": 0,
                "skipped": 0,
                "rolled_back": 0,
                "logp_diff_mean": 2e-7 * noise.random() if fresh else None,
                "logp_diff_max": 4e-6 * noise.random() if fresh else None,
                "objective": {"reward_kl": noise.random()},
            }
        if step % 20 == 0:
            held = min(0.97, reward) + noise.gauss(0, 0.01)
            row |= {
                "eval_reward": held,
                "eval_reward_se": math.sqrt(max(held * (1 - held), 0.01) / 256),
                "eval_n": 256,
                "eval_unscored": 0,
            }
            row |= {
                "eval_kl_ref": max(0.0, 0.01 * (step - 60)),
                "kl_ref": row["kl_ref"] or max(0.0, 0.01 * (step - 60)),
            }
        yield row


def write_run(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_rows(folder / "metrics.jsonl", rows())
    return folder


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def configure(folder, **changes):
    """Change settings of a run, `section__key=value`."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = config
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder, change):
    """Change the rows of a run; those that become None are left out."""
    changed = (change(row) for row in read_rows(folder / "metrics.jsonl"))
    write_rows(folder / "metrics.jsonl", (row for row in changed if row is not None))
