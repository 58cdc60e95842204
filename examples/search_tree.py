"""Pairs of sibling actions for `agent_q`, from a store of scored samples.

python examples/search_tree.py STORE THETA

Here a state of the tree is a prompt, and the value of an action its reward: a tree of one level. In your own
search it is the mean return of the visits below an action, or its average with a critic's value.
"""

import sys
from collections import defaultdict
from pathlib import Path

from agro.store import Store
from agro_papers.tree_search import step_pairs


def judge(path: Path, theta: float) -> tuple[int, int]:
    """Return the numbers of added pairs and of samples without a reward, which are in no pair."""
    unscored = 0
    states: dict[str, dict[int, float]] = defaultdict(dict)
    with Store.open(path) as store:
        for sample in store.samples():
            if sample.reward is None:
                unscored += 1
            else:
                states[sample.prompt_id][sample.stored_id] = sample.reward
        pairs = [pair for values in states.values() for pair in step_pairs(values, theta=theta, most=8)]
        store.add_pairs(pairs)
    return len(pairs), unscored


if __name__ == "__main__":
    added, unscored = judge(Path(sys.argv[1]), float(sys.argv[2]))
    print(f"{added} pairs; {unscored} samples have no reward")
