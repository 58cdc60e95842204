"""Pairs that a run makes itself: a demonstration over a sample of an earlier version, or two turns of a
search."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch

from agro.objectives.core import Objective, Streams, Terms, preset
from agro.objectives.methodrecipe import MethodRecipe
from agro.objectives.methods import preference
from agro.objectives.methods.preference import ORDERED, BetaOfJudgments, judged, log_ratio, ordered
from agro.objectives.options import Option
from agro.objectives.reduce import Pairs
from agro.types import Batch


def seppo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    doubt: Annotated[
        Literal["flip", "drop"],
        Option(
            "what to do with the sample where the reference fits the winner better: praise it, or drop it"
        ),
    ] = "flip",
) -> Terms:
    """−log σ(β (ρ_w − s ρ_0)), s = sign ρ_w without gradient, 1 at 0: SePPO (arXiv 2410.05255), for text.

    A pair is a winner from the data and, in the loser's place, a sample y_0 of the reference, which in the
    paper is a random earlier checkpoint. Where the policy already fits the winner better than the reference
    does, s = 1 and this is DPO; elsewhere the reference counts as the better one and its sample is praised (s
    = −1), or left out with doubt = "drop" (s = 0). The paper is on diffusion models; the loss is
    reconstructed from its description.
    """
    pairs = Pairs.of(batch)
    rho_N = log_ratio(streams, batch, pairs.groups)
    fits_P = rho_N[pairs.winner].detach() >= 0
    sign_P = torch.where(fits_P, 1.0, -1.0 if doubt == "flip" else 0.0)
    margin_P = beta * (pairs.gap(rho_N) + (1 - sign_P) * rho_N[pairs.loser])
    return Terms(pairs.average(-torch.nn.functional.logsigmoid(margin_P)), metrics=ordered(pairs, margin_P))


SEPPO = judged(
    seppo,
    "SePPO, arXiv 2410.05255",
    ORDERED,
    MethodRecipe(
        "SePPO (arXiv 2410.05255) for text: demonstrations against samples of a random earlier version "
        "of the policy, which is also the reference.",
        base="experts",
        options={"beta": 0.1, "singletons": "drop"},
        shown=("doubt",),
        settings={
            "sampler.n": 2,
            "data.experts_win": True,
            "policy.reference": "sampler",
            "source.sync_every": 10,
            "source.sync_from": 4,
        },
        notes={
            "singletons": "prompts without an expert's response have no pair; they are counted",
            "data.experts_win": "a pair of each expert's response and each sample to its prompt",
            "policy.reference": "the version that samples",
            "source.sync_every": "optimizer steps between two versions that are kept",
            "source.sync_from": "the last versions, of which one is drawn at random at each of these",
        },
        required='policy.model, data.prompts, and data.store with records of role "expert" to the same '
        "prompts. The reward is measured, and not trained on.",
    ),
)

ENTRIES: dict[str, Objective] = {
    "seppo": replace(SEPPO, certainty="reconstructed"),
    "agent_q": preset(
        preference.ENTRIES["dpo"],
        "Agent Q, arXiv 2408.07199",
        "DPO on pairs of actions tried in one state of a search tree (`step_pairs`), "
        "with the log-probs that were recorded when they were sampled for the reference's: −log σ(β ((l_w "
        "− b_w) − (l_l − b_l))). It needs no reference, and its anchor is as old as the tree.",
        certainty="notes",
        anchor="behavior",
        recipe=MethodRecipe(
            "Agent Q (arXiv 2408.07199): a search over the turns of an environment, by upper confidence "
            "bounds and the policy's own critique, and DPO on turns of one state, against their recorded "
            "log-probs.",
            options={"beta": 0.1},
            settings={
                "sampler.n": None,
                "sampler.max_new": 64,
                "environment.name": "examples/environments/spelling.py:Spelling",
                "environment.max_turns": 8,
                "source.sync_every": 8,
                "source.around": "tree_search",
                "source.options.by": "ucb",
                "source.options.branches": 4,
                "source.options.expansions": 16,
                "source.options.explore": 1.0,
                "source.options.critique": " Is this a good step? ",
                "source.options.good": "yes",
                "source.options.alpha": 0.5,
                "source.options.theta": 0.2,
            },
            notes={
                "sampler.max_new": "tokens of a turn",
                "source.sync_every": "trees are searched by weights that the policy leaves behind: at those "
                "the anchor would be 0, and β would only scale the gradient",
                "environment.name": "yours, as module:Class or file.py:Class",
                "environment.max_turns": "depth of the tree",
                "source.options.branches": "turns that are tried at once in a state",
                "source.options.expansions": "states of a prompt in which they are tried",
                "source.options.explore": "c of the bound Q + c √(log N / n)",
                "source.options.critique": "asked after a turn; the answer's probability is the critique",
                "source.options.alpha": "share of the search in a turn's value, beside the critique",
                "source.options.theta": "the values of a pair differ by more",
            },
            commands=("agro train {name} policy.model=MODEL data.prompts=prompts.jsonl --out runs/{name}",),
            required="policy.model, data.prompts, and an environment with rewards; that of the example reads "
            "the column answer. A search of your own judges turns with `step_pairs`, as "
            "examples/search_tree.py does.",
        ),
    ),
}
