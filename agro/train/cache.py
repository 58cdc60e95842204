"""Reference log-probs that were computed before, by this run or another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agro.policy import Policy
from agro.reference import fingerprint
from agro.store import Store
from agro.train.micro import MicroBatch
from agro.train.step import streams_of
from agro.types import Batch, Sample


class ReferenceCache:
    """Keyed by sample, tokenizer and reference (weights and temperature).

    The last bits of a log-prob depend on the rows that it was computed with, so a resumed run must find what it found
    before: entries of its own steps that count, and of others' those that were there when it began (`until`).
    """

    def __init__(self, store: Store, run: str, reference: Policy, micro: MicroBatch, until: int) -> None:
        self.store, self.run, self.reference, self.micro, self.until = store, run, reference, micro, until
        self.key = f"{reference.fingerprint}/{fingerprint(reference)}"

    def fill(self, batch: Batch, samples: Sequence[Sample], step: int) -> Batch:
        """The batch with `ref_logp` of its rows, which are `samples`; what was missing is kept for later."""
        ids = [s.id for s in samples if s.id is not None]
        assert len(ids) == len(samples)
        known = self.store.reference_logp(self.run, self.key, ids, until=self.until)
        wanted = batch.mask.sum(1).tolist()
        missing = [row for row, i in enumerate(ids) if i not in known or len(known[i]) != wanted[row]]
        out = torch.zeros(batch.mask.shape, dtype=torch.float64, device=batch.mask.device)
        if missing:
            rows = torch.tensor(missing, device=batch.mask.device)
            out[rows] = streams_of(self.reference, batch.rows(rows), ["logp"], self.micro)["logp"]
            new = {ids[row]: out[row][batch.mask[row]].float().cpu().numpy() for row in missing}
            self.store.keep_reference_logp(self.run, step, self.key, new)
        for row in set(range(len(ids))) - set(missing):
            out[row, batch.mask[row]] = torch.tensor(known[ids[row]], dtype=torch.float64, device=out.device)
        return batch.replace(ref_logp=out)
