"""What the owner of a store does for others: the methods of a store's parts, by what a lost answer means.

All else, such as importing and forgetting, needs the file.
"""

from __future__ import annotations


def named(**parts: str) -> frozenset[str]:
    return frozenset(f"{part}.{name}" for part, names in parts.items() for name in names.split())


# These may simply be repeated.
READS = named(
    experience="samples_page last_id check_ids check_prompts find in_ledger rewards next_number "
    "pairs_page pairs_between known_ids ids_of",
    survey="group_rows_page prompts_page begun_groups groups_page summaries_page counts scales meetings",
    draws="candidates require recorded_groups look drawn uses trained tally",
    requests="collectors ready backlog",
    ledger="commits committed knows fingerprint last_reference_logp reference_logp",
    imports="provenance",
    tables="check damage damaged",
    leases="alive",
    clusters="of",
    shard="fits place plan",
)
# These too: they bring an order of groups up to date, which can be made again.
ORDERS = named(draws="pick count_groups first_groups groups_between groups_of_version")
# These too: what they write is their answer. A step has one draw, a run its clusters, a name one lease.
REPEATABLE = named(
    draws="draw_picked",
    clusters="keep",
    leases="renew release",
    shard="join agree drop_plan",
    requests="note",
)
# The answers of these are kept in the transaction that writes, and given again.
ONCE = named(
    experience="append set_rewards add_pairs",
    draws="record",
    requests="claim finish take reopen",
    ledger="commit rewind follow keep_reference_logp",
    shard="reserve",
)
WRITES = REPEATABLE | ONCE
METHODS = READS | ORDERS | WRITES
