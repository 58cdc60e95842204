"""The systems that this project is built from, and what of each is here.

What a recipe lacks stands with the recipe (`missing`); a system is whole where none of its recipes lacks
anything, nothing is missing below, and all that was measured of it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agro.config.recipes import recipes
from reproductions.systems.row import Row

Extent = Literal["whole", "mechanism only", "the loss", "the rule", "no"]


@dataclass(frozen=True)
class System:
    name: str
    paper: str
    """arXiv number, or author and year"""
    recipes: tuple[str, ...] = ()
    missing: str = ""
    """beyond what its recipes say of themselves"""
    part: Extent = "the loss"
    """what is here where something is missing"""

    @property
    def lacks(self) -> str:
        """All that is missing; "" where nothing is."""
        known = recipes()
        reasons = [self.missing, *(known[name].missing for name in self.recipes)]
        return " ".join(dict.fromkeys(reason for reason in reasons if reason))

    def extent(self, rows: Sequence[Row]) -> Extent:
        """`rows`: the measurements of this system."""
        if self.part == "no":
            return "no"
        return "whole" if rows and not self.lacks and all(row.holds for row in rows) else self.part

    def reason(self, rows: Sequence[Row]) -> str:
        """Why it isn't whole; "" where it is."""
        failed = [] if all(row.holds for row in rows) else ["Not all that is measured holds."]
        unmeasured = [] if rows or self.part == "no" else ["Nothing of it is measured here."]
        return " ".join(filter(None, (self.lacks, *failed, *unmeasured)))


SHIFTED = "a mean shifted by β"
REVAL = "Of ReVal V of the reference at the first token, which it subtracts: no pass gives it."
OLD_LOGITS = "The trainer's log-probs of the version that sampled: a copy of the weights for each."
FEWER = "That it needs fewer rollouts isn't measured."
NESTED = "Tokens a second, and what its three corrections change, aren't measured."
ROBUST = "Its speed, and that online DPO bears staleness best, aren't measured."
REVISED = "The expert's revision is the user's, and images aren't read."
SPEED = "Its speed-up on many GPUs: one host had 1.19 (`benchmarks/results/asynchrony.json`)."
UNREAD = "Its text, which wasn't found to read."
SYSTEMS = (
    System("AGRO off-policy", "2503.19612", ("agro", "log", "mixed", "replay")),
    System("AGRO on-policy", "2503.19612", ("agro_onpolicy",)),
    System("AGRO at the token level", "2503.19612"),
    System("KL-regularized policy gradient", "2503.19612", ("kl_pg",)),
    System("RLOO and REINFORCE", "2402.14740", ("rloo", "reinforce")),
    System("DRO-V", "2405.19107", ("dro",)),
    System("DPO, IPO, SLiC (GPO)", "2402.05749", ("dpo", "ipo", "slic", "gpo")),
    System("path consistency, trajectory balance", "1702.08892", ("prefix_consistency", "vargrad")),
    System("CoPG", "2406.19185", ("copg",)),
    System("PPO", "1707.06347", ("ppo",)),
    System("GRPO, Dr. GRPO, DAPO, GSPO, CISPO", "2402.03300", ("grpo", "dr_grpo", "dapo", "gspo", "cispo")),
    System("OAPL", "2602.19362", ("oapl",)),
    System("A*PO", "2505.20686", ("apo",)),
    System("GVPO, VarGrad", "2504.19599", ("gvpo", "vargrad")),
    System("MinPRO", "2601.22718", ("minpro",)),
    System("ARB", "2512.10510", ("arb",), part="the rule"),
    System("Nested-ReFT", "2508.10123", ("nested_reft",), NESTED, "mechanism only"),
    System("ReMix", "2507.06892", ("remix",), FEWER, "mechanism only"),
    System("VIPO, model-based", "–", missing="A world model of an environment's states.", part="no"),
    System("VPO", "2410.22891", ("vdpo", "vipo")),
    System("Async RLHF", "2410.18252", ("online_dpo",), ROBUST, "mechanism only"),
    System("Mixture of Attentions", "2410.03804", ("speculative", "trained_draft"), part="the rule"),
    System("experience-replayable conditions", "2402.10374", ("erc",)),
    System("CHORD", "2508.11408", ("chord",)),
    System("PROPS", "2311.08290", ("adaptive_sampling",)),
    System("SOPHIA", "2507.16814", ("sophia",), part="the rule"),
    System("HNPG", "2311.08384", ("hnpg",)),
    System("OORL, GEPO", "2505.12723", ("oorl", "gepo")),
    System("OPA-DPO", "2501.09695", ("opa_dpo",), REVISED, "mechanism only"),
    System("REC, REP, RED, OPMD, AsymRE", "2509.24203", ("rec", "red_drop", "red_weight", "opmd", "asymre")),
    System("MDPO", "2005.09814", ("mdpo",)),
    System("SePPO", "2410.05255", ("seppo",)),
    System("OTR", "2509.26313", ("otr",)),
    System("inverse RL from demonstrations", "2310.06147", ("inverse_rl",)),
    System(
        "VolleyBots", "2502.01932", missing="A benchmark of drones, and no method of training.", part="no"
    ),
    System("GAD", "2511.10643", ("gad",), part="the rule"),
    System("ABPO", "2605.18899", ("complete_groups",), missing=UNREAD, part="the rule"),
    System("AILBoost", "2404.08513", ("ailboost",), part="the rule"),
    System("SAC", "1812.05905", ("tuned_beta",), part="the rule"),
    System("TempSamp-R1", "2509.18056", ("tempsamp_r1",)),
    System("RLFR", "2510.10201", ("rlfr",), part="the rule"),
    System("ranking accuracy of preferences", "2405.19534", part="the rule"),
    System(
        "PMOE",
        "2104.09122",
        missing="A policy that is a sum over adapters: a pass for each at every token, and another engine.",
        part="no",
    ),
    System("Lipschitz imitation", "2006.16785", ("gail", "smooth_reward"), part="the rule"),
    System("BAPO", "2510.18927", ("bapo", "bapo_code")),
    System("residual RL", "2509.19301", ("residual",), part="the rule"),
    System("off-policy evaluation, ad loads", "2309.11518", part="the rule"),
    System("SharpeRatio@k", "2311.18207", part="the rule"),
    System("TOPR", "2503.14286", ("topr",)),
    System("BFS-Prover-V2", "2509.06493", ("bfs_prover", "middle_band"), part="the rule"),
    System("realizability and coverage", "2211.05311", part="the rule"),
    System("AMPO", "2510.02227", ("ampo",)),
    System("quality and coverage of a log", "2111.04714", part="the rule"),
    System("MBRCSL", "2310.19308", ("reward_conditioned", "mbrcsl"), part="the rule"),
    System("Guide", "2506.13923", ("guide",)),
    System("Agent Q", "2408.07199", ("agent_q",)),
    System("LlamaRL", "2505.24034", ("aipo",), SPEED, "mechanism only"),
    System("self-play, SPIN", "2401.01335", ("self_play",)),
    System("TBRM, ReVal", "2505.15311", ("tbrm",), missing=REVAL),
    System("QRPO", "2507.08068", ("qrpo",)),
    System("FPA", "2509.19893", ("fpa",)),
    System("OREO", "2412.16145", ("oreo",)),
    System("PEAR", "2602.01058", ("pear",)),
    System("FreshPER", "2604.16918", ("freshper",), part="the rule"),
    System(SHIFTED, "2605.28150", ("kimi_shifted",)),
    System("SPO", "2509.13232", ("one_response",), part="the rule"),
    System("Missing old logits", "2605.12070", missing=OLD_LOGITS, part="no"),
    System("ECHO", "2605.24517", ("echo",)),
    System("MP1, ARIES", "2507.10543", missing="Robot control and a world of their own.", part="no"),
)
