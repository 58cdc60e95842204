"""Whether a model ranks the better of two stored responses higher: AUC within the prompts of a store, and the
ranking accuracy on its judged pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agro.errors import Refused
from agro.objectives.needs import PAIRS, REWARD
from agro.objectives.pairs import Pairs
from agro.policy import Policy
from agro.store import Drawn, Store
from agro.train.collate import collate, total_reward
from agro.train.diagnostics import ranking, summary
from agro.train.feed import select_valid
from agro.train.micro import TOKENS, MicroBatch
from agro.train.step import Passes, streams_of
from agro.train.trainable import pairs_among


def rank_store(store: Store, policy: Policy, reference: Policy | None) -> dict[str, Any]:
    """Within-prompt AUC of log π/π_ref, or of log π without a reference; see `diagnostics.ranking`.

    Log-probs are in nats, of complete responses: sums over their tokens. Raises `Refused` where the two have
    different tokenizers.

    Returns:
        auc_of: what is ranked. auc, auc_se: mean over prompts and its standard error (None where unknown).
        auc_groups: prompts whose rewards differ. auc_dropped: their invalid responses.
        ranked_share: share of the judged pairs whose winner has at least the log π of the loser (ranking
        accuracy, arXiv 2405.19534), ranked_share_per_token: per token; None without pairs. ranked_pairs:
        the pairs.
    """
    if reference is not None and reference.fingerprint != policy.fingerprint:
        raise Refused(
            f"expected a reference with the tokenizer of the model, got another ({reference.name}); use the "
            "model that training started from"
        )
    passes = Passes(MicroBatch(tokens=TOKENS))
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
        **_of_pairs(store, policy, passes),
    }


def _of_pairs(store: Store, policy: Policy, passes: Passes) -> dict[str, Any]:
    """Of all judged pairs whose two responses are valid, which weigh equally."""
    gaps = [np.empty((0, 2))]
    for prompt_id, pairs in pairs_among(store.known(), {PAIRS}, store).items():
        drawn = Drawn(list(store.samples(prompt_id=prompt_id)), pairs)
        valid = select_valid(drawn, policy.encoder, None, {PAIRS})
        if valid.pairs:
            batch = collate(valid.samples, 0, valid.pairs).to(policy.device)
            logp_BT = streams_of(policy, batch, ["logp"], passes)["logp"]
            gaps.append(_gaps(Pairs.of(batch), logp_BT))
    right = np.concatenate(gaps) >= 0
    shares = right.mean(0).tolist() if len(right) else [None, None]
    return {
        "ranked_share": shares[0],
        "ranked_share_per_token": shares[1],
        "ranked_pairs": len(right),
    }


def _gaps(pairs: Pairs, logp_BT: torch.Tensor) -> NDArray[np.float64]:
    """[P,2] log π of the winner minus that of the loser: in all, and per token."""
    of_all = pairs.gap(pairs.groups.sum_tokens(logp_BT))
    per_token = pairs.gap(pairs.groups.mean_tokens(logp_BT))
    return torch.stack([of_all, per_token], 1).cpu().numpy()
