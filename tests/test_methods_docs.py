"""docs/methods.md is made from the entries; the names of other libraries are answered with ours."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc import locate

import pytest

from agro import objectives
from agro.errors import Refused
from agro.methods_docs import RULES, methods
from agro.objectives import peers

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_entries() -> None:
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert page == methods(), "run: python -m agro.methods_docs"
    assert all(f"`{name}`" in page for name in objectives.names())


def test_the_settings_of_rules_exist() -> None:
    """Each as docs/configuration.md, the guide's table of metrics, a command, a module, an objective or a
    recipe has it."""
    pages = ("configuration.md", "guide/reading-the-report.md", "command-line.md")
    settings = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    recipes = {recipe.stem for recipe in (ROOT / "agro/recipes").rglob("*.toml")}
    for what in RULES.values():
        for words in re.findall(r"`([^`]+)`", what):
            name = " ".join(words.split(" ")[: 2 if words.startswith("agro ") else 1])
            known = name in recipes or name in objectives.names() or f"`{name}`" in settings
            assert known or name in settings or (name.startswith("agro.") and locate(name)), name


@pytest.mark.parametrize("name", objectives.names())
def test_a_method_has_a_recipe_of_its_name(name: str) -> None:
    recipe = (ROOT / f"agro/recipes/methods/{name}.toml").read_text(encoding="utf-8")
    assert f'name = "{name}"' in recipe


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AGRO", "did you mean agro?"),
        ("loo", "did you mean rloo?"),
        ("reinforce-plus-plus", "here it is reinforce_pp"),
        ("sigmoid", "here it is dpo"),
        ("BNPO", 'here it is grpo with average = "token"'),
        ("spo", "here it is rloo with baseline"),
        ("cpo", "it has no counterpart here"),
        ("xyzzy", "there are agro, agro_onpolicy, "),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(name: str, said: str) -> None:
    with pytest.raises(Refused, match=f"got '{name}'; {said}".replace("?", r"\?")):
        objectives.get(name)


def test_an_option_of_another_library_is_answered_with_ours() -> None:
    with pytest.raises(Refused, match=r"objective grpo: unknown option epsilon; clip = .* sets it here"):
        objectives.describe("grpo", epsilon=0.2)
    for theirs, ours in (("dr_grpo", "dr_grpo"), ("bnpo", "grpo"), ("reinforce_plus_plus", "reinforce_pp")):
        with pytest.raises(
            Refused, match=f'unknown option loss_type; objective.name = "{ours}" sets it here'
        ):
            objectives.describe("grpo", loss_type=theirs)
    others = {
        "banana": 'objective.name = "banana" sets it here, if `agro objectives` lists it',
        "spo": r'objective.name = "rloo" sets it here \(rloo with baseline = "stored"',
    }
    for theirs, said in others.items():
        with pytest.raises(Refused, match=f"unknown option loss_type; {said}"):
            objectives.describe("grpo", loss_type=theirs)


def test_what_is_named_for_others_exists() -> None:
    answers = " ".join([*peers.OPTIONS.values(), *peers.ELSEWHERE.values()])
    assert all(entry.split()[0].rstrip(",") in objectives.names() for entry in peers.ELSEWHERE.values())
    known = {key for name in objectives.names() for key in objectives.get(name).options.model_fields}
    assert {"beta", "std", "clip"} <= known
    assert "  " not in answers
