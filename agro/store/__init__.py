"""The experience store: samples, draws of them, sampling requests, and imports."""

from agro.store.copying import RecoveryReport, recover, write_samples
from agro.store.database import Damage
from agro.store.draw_rules import At, DrawRule, Selection, is_held_out
from agro.store.drawing import DamagedSample, Draw, DrawnGroups
from agro.store.ledger import Commit, Rewind
from agro.store.sample_rows import Origin
from agro.store.samples import Pair
from agro.store.store import Store
from agro.store.survey import Counts, Group, SampleSummary

__all__ = ["At", "Commit", "Counts", "Damage", "DamagedSample", "Draw", "DrawRule", "DrawnGroups", "Group"]
__all__ += ["Origin", "Pair", "RecoveryReport", "Rewind", "SampleSummary", "Selection", "Store"]
__all__ += ["is_held_out", "recover", "write_samples"]
