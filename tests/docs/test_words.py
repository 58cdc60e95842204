"""What the documentation puts in backticks exists: configuration keys, commands, options, metrics, names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import get_args

import config_docs
import options_docs
import pytest
from pages import PAGES, ROOT, blocks, quoted

from agro import objectives
from agro.api.trl_arguments import WITHOUT_COUNTERPART
from agro.cli import commands
from agro.cli.program import command
from agro.config import RunConfig
from agro.config.recipes import recipes
from agro.io import peers, plugins
from agro.logs.mapping import MAPPABLE
from agro.runs.rundata import FOLLOWED, METRICS, TABLES

CONFIGURATION = ROOT / "docs/configuration.md"
# Below agro: rooms whose names the documentation may use alone.
ROOMS = """
api config types objectives store samplers rewards rollout rollout.evaluate rollout.envs rollout.engines
models.policy train.loop train.trainer train.monitors train.monitors.guard api.plan
"""
COMMANDS = {entry.name: command(entry.name).params for entry in commands.COMMANDS}
# Of verl, TRL, HumanEval and MBPP; of meta; options of rewards.
FOREIGN = """
compute_score adv_estimator kl_penalty ppo_mini_batch_size rollout_correction train_batch_size
use_kl_in_reward per_device_train_batch_size entry_point test_list test_setup_code reward_details api_key
memory_mb max_calls
"""
# Orders of draws, arguments of rewards, and metrics of single objectives.
OWN = """
least_used age_weighted old_logp completion_ids answer_marker ratio_max clipped_share kl_sampled_prefixes
likelihood_ratio reversed_share trap_ratio singletons_dropped ties_dropped explained_variance value_mean
value_loss ordered_share implicit_margin ranked_share ranked_share_per_token ranked_share_anchor
ranked_share_ideal reference_point imitation_loss observation_loss weight_mean kept_share
"""


def keys() -> set[str]:
    """Every dotted key of the configuration, the options of all objectives among them."""
    schema = RunConfig.model_json_schema()

    def walk(prefix, section) -> Iterator[str]:
        for key, _, inner in config_docs.values(prefix, section, schema["$defs"]):
            yield key
            if inner is not None:
                yield from walk(f"{key}.", inner)

    sources = [plugins.load("sources", name, name) for name in options_docs.sources_of_agro()]
    found = set(walk("", schema)) | {f"source.options.{o}" for s in sources for o in s.options.model_fields}
    return found | {f"objective.{o}" for n in objectives.names() for o in objectives.describe(n)["options"]}


KNOWN = keys()
SECTIONS = "|".join(RunConfig.model_fields.keys() - {"phases"})  # of which each has its own names


def words() -> set[str]:
    """What a word with an underscore may be."""
    found = {*METRICS, *FOLLOWED, *MAPPABLE, *OWN.split(), *objectives.names(), *recipes()}
    found |= {*FOREIGN.split(), *peers.SETTINGS, *peers.ALIASES, *WITHOUT_COUNTERPART}
    found |= {key.rsplit(".", 1)[-1] for key in KNOWN} | set(options_docs.sources_of_agro())
    found |= {need for n in objectives.names() for o in ({}, {"beta": 1.0}) for need in needs(n, o)}
    for room in ("agro", *(f"agro.{name}" for name in ROOMS.split())):
        module = importlib.import_module(room)
        found |= set(dir(module))
        for value in vars(module).values():
            found |= (
                set(dir(value)) if isinstance(value, type) and value.__module__.startswith("agro") else set()
            )
    return found


def needs(name: str, options: dict) -> list[str]:
    known = objectives.describe(name)["options"]
    return objectives.describe(name, **{k: v for k, v in options.items() if k in known})["needs"]


WORDS = words()


CHECKS = (
    (rf"(?<![\w./-])(?:phases\.\w+\.)?((?:{SECTIONS})(?:\.[a-z_]+)+)", KNOWN, "no configuration key {}"),
    (r"^\[+([a-z_.]+)\]+$", KNOWN, "no section {}"),
    (r"^[a-z]+(?:_[a-z]+)+$", WORDS, "{} is no metric, key, field or name"),
)
KINDS = {f"agro.{kind}" for kind in get_args(plugins.Kind)}  # of entry points


def wrong(text: str) -> str:
    """What is wrong with a text in backticks, or nothing."""
    for pattern, known, message in CHECKS:
        for found in re.findall(pattern, text):
            if found not in known:
                return message.format(found)
    if re.fullmatch(r"(reproductions|benchmarks|tests|examples|docs|agro)/[\w./-]+", text):
        return "" if (ROOT / text).exists() else f"no file {text}"
    if re.fullmatch(r"agro(_papers)?(\.\w+)+", text) and text not in KINDS:
        return missing(text)
    return wrong_command(text)


def wrong_command(text: str) -> str:
    match = re.match(r"agro ([a-z][a-z-]*)", text)
    if match and match[1] not in COMMANDS:
        return f"no command agro {match[1]}"
    if not text.startswith(("agro ", "--")):
        return ""
    commands = [match[1]] if match else COMMANDS
    known = {o for command in commands for p in COMMANDS[command] for o in p.opts}
    for option in re.findall(r"(?<!\S)--[a-z-]+", text):
        if option not in known | {"--help", "--version"}:
            return f"no option {option}"
    return ""


def missing(name: str) -> str:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return f"{name}: no {part}"
            value = getattr(value, part)
        return ""
    return f"no module {name}"


@pytest.mark.parametrize("page", [*PAGES, CONFIGURATION], ids=lambda page: page.stem)
def test_what_stands_in_backticks_exists(page) -> None:
    found = [f"{where}: `{text}`: {why}" for where, text in quoted(page) if (why := wrong(text))]
    found += [f"{b.where}: {c}: {why}" for b in blocks(page) for c in b.commands if (why := wrong(c))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("train.stesp", "no configuration key train.stesp"),
        ("policy.lora.rank=8", ""),
        ("objective.singletons", ""),
        ("[policy.lora]", ""),
        ("[polcy]", "no section polcy"),
        ("agro trian x", "no command agro trian"),
        ("agro eval --modle M", "no option --modle"),
        ("--json", ""),
        ("groups_equal", ""),
        ("groups_same", "groups_same is no metric, key, field or name"),
        ("agro.store.Store.draw", ""),
        ("agro.store.Stroe", "agro.store.Stroe: no Stroe"),
        ("agro/config/recipes/fresh.toml", ""),
        ("agro/config/recipes/frish.toml", "no file agro/config/recipes/frish.toml"),
        ("phases.NAME.train.steps", ""),
    ],
)
def test_a_mistake_is_found(text: str, why: str) -> None:
    assert wrong(text) == why


def test_the_table_of_metrics_is_up_to_date() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert TABLES in page, "copy agro/runs/metrics.md into the page"


def test_the_page_of_methods_has_all_options_of_peers() -> None:
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert [name for name in [*peers.ALIASES, *peers.SETTINGS] if f"`{name}`" not in page] == []
