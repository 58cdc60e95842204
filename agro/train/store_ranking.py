"""Whether a model ranks the better of two stored responses higher: AUC within the prompts of a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agro.errors import Refused
from agro.objectives.needs import REWARD
from agro.policy import Policy
from agro.store import Drawn, Store
from agro.train.collate import collate, total_reward
from agro.train.diagnostics import ranking, summary
from agro.train.feed import select_valid
from agro.train.micro import SEQUENCES, MicroBatch
from agro.train.step import Passes, streams_of


def rank_store(store: Store, policy: Policy, reference: Policy | None) -> dict[str, Any]:
    """Within-prompt AUC of log π/π_ref, or of log π without a reference; see `diagnostics.ranking`.

    Log-probs are in nats, of complete responses: sums over their tokens. Raises `Refused` where the two have
    different tokenizers.

    Returns:
        auc_of: what is ranked. auc, auc_se: mean over prompts and its standard error (None where unknown).
        auc_groups: prompts whose rewards differ. auc_dropped: their invalid responses.
    """
    if reference is not None and reference.fingerprint != policy.fingerprint:
        raise Refused(
            f"expected a reference with the tokenizer of the model, got another ({reference.name}); use the "
            "model that training started from"
        )
    passes = Passes(MicroBatch(SEQUENCES))
    auc, dropped = [np.empty(0)], 0
    for group in store.groups():
        samples = list(store.samples(prompt_id=group.prompt_id))
        valid = select_valid(Drawn(samples), policy.encoder, None, {REWARD}).samples
        if len({total_reward(s) for s in valid}) < 2:
            continue
        dropped += len(samples) - len(valid)
        batch = collate(valid, 0).to(policy.device)
        logp = streams_of(policy, batch, ["logp"], passes)["logp"]
        ref_logp = torch.zeros_like(logp)
        if reference is not None:
            ref_logp = streams_of(reference, batch, ["logp"], passes)["logp"]
        auc.append(ranking(batch.replace(ref_logp=ref_logp), logp))
    auc_G = np.concatenate(auc)
    mean = summary("auc", auc_G)
    return {
        "auc_of": "log π" if reference is None else "log π/π_ref",
        "auc": mean.get("auc"),
        "auc_se": mean["auc_se"] if len(auc_G) > 1 else None,
        "auc_groups": len(auc_G),
        "auc_dropped": dropped,
    }
