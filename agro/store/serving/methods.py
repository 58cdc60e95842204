"""What the owner of a store does for others: the methods of a store's parts, by what a lost answer means.

All else, such as importing and forgetting, needs the file.
"""

from __future__ import annotations


def _named(**parts: str) -> frozenset[str]:
    return frozenset(f"{part}.{name}" for part, names in parts.items() for name in names.split())


# These may simply be repeated.
READS = _named(
    experience="samples_page last_id check_ids check_prompts find find_in_ledger rewards next_number "
    "pairs_page pairs_between",
    survey="group_rows_page prompts_page groups groups_page summaries_page counts scales meetings",
    draws="pick candidates require recorded_groups look drawn uses trained",
    requests="collectors ready backlog",
    ledger="commits committed knows fingerprint last_reference_logp reference_logp",
    imports="provenance",
    tables="check damage damaged",
    leases="alive",
)
# These too: what they write is their answer. A step has one draw, a run its clusters, a name one lease.
REPEATABLE = _named(draws="draw_picked", clusters="keep", leases="renew release")
# The answers of these are kept in the transaction that writes, and given again.
ONCE = _named(
    experience="append set_rewards add_pairs",
    draws="record",
    requests="claim finish take reopen",
    ledger="commit rewind keep_reference_logp",
)
WRITES = REPEATABLE | ONCE
METHODS = READS | WRITES
