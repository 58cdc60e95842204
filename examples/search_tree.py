"""Pairs of sibling actions for `agent_q`, from a store of scored samples.

python examples/search_tree.py STORE THETA

Here a state of the tree is a prompt, and the value of an action its reward: a tree of one level. A search of
your own gives `Attempt` the mean return of the visits below an action, and the critic's value of it.
"""

import sys
from collections import defaultdict
from pathlib import Path

from agro.store import Store
from agro_papers.tree import Attempt, step_pairs


def judge(path: Path, theta: float) -> int:
    """The pairs added."""
    states: dict[str, list[Attempt]] = defaultdict(list)
    with Store.open(path) as store:
        for sample in store.samples():
            states[sample.prompt_id].append(Attempt(sample.id, sample.reward))
        pairs = [pair for tried in states.values() for pair in step_pairs(tried, theta=theta, most=8)]
        store.add_pairs(pairs)
    return len(pairs)


if __name__ == "__main__":
    print(judge(Path(sys.argv[1]), float(sys.argv[2])), "pairs")
