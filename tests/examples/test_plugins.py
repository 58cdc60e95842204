"""`examples/plugins`: what an installed package registers is used by its name.

Without pip: folders with the metadata that it would write are put on the path.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agro.config import ObjectiveConfig, RewardConfig, recipes
from agro.errors import Refused
from agro.io import plugins
from agro.objectives import evaluate, get, names
from agro.proof.claims import claims_of
from agro.rewards import load_reward
from agro.rollout.envs.playing import make_environment
from agro.types import Batch, Sample

FOLDER = Path(__file__).parents[2] / "examples/plugins"
Install = Callable[[Path, dict[str, dict[str, str]]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a folder of modules on the path, with metadata of these entry points."""

    def put(folder: Path, groups: dict[str, dict[str, str]]) -> None:
        metadata = tmp_path / folder.name / f"{folder.name}-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0\n")
        sections = [[f"[{group}]", *map(" = ".join, of.items())] for group, of in groups.items()]
        (metadata / "entry_points.txt").write_text("\n".join(line for lines in sections for line in lines))
        monkeypatch.syspath_prepend(str(metadata.parent))
        monkeypatch.syspath_prepend(str(folder))
        plugins.installed.cache_clear()

    yield put
    plugins.installed.cache_clear()


def of_example(name: str) -> tuple[Path, dict[str, dict[str, str]]]:
    project = tomllib.loads((FOLDER / name / "pyproject.toml").read_text())["project"]
    return FOLDER / name, project["entry-points"]


def values(name: str, **options: object) -> list[float | None]:
    samples = [Sample("hello", text, meta={"answer": "Thank"}) for text in ("Thank you. Please!", "thanks")]
    with closing(load_reward(RewardConfig(name=name, options=options))) as reward:
        return [score.value for score in reward.score(samples)]


def test_installed_rewards_are_used_by_their_names(install: Install) -> None:
    install(*of_example("reward"))
    assert values("politeness") == [2 / 3, 1 / 3]
    assert (values("mentions"), values("mentions", case=False)) == ([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(Refused, match=r"unknown key cas; did you mean case\?"):
        values("mentions", cas=False)
    with pytest.raises(Refused, match=r"politeness, mentions.*did you mean politeness\?"):
        values("polite")


def test_an_installed_objective_is_used_by_its_name(install: Install) -> None:
    """Rewards 1, 0 and ½; log-probs −3, −1.5 and −3.1 over the unmasked tokens: 3/3, and (3 + 3.1)/3."""
    install(*of_example("objective"))
    batch = Batch.of(mask=[[False, True, True]] * 3, reward=[1.0, 0.0, 0.5], group=["a"] * 3)
    logp = [[0.0, -1.0, -2.0], [0.0, -0.5, -1.0], [0.0, -3.0, -0.1]]
    losses = [evaluate("best_of_group", logp, batch, margin=margin).loss for margin in (0.0, 0.5)]
    assert losses == pytest.approx([1.0, 6.1 / 3])
    assert ObjectiveConfig(name="best_of_group", margin=0.5).options["margin"] == 0.5
    with pytest.raises(Refused, match="margin"):
        get("best_of_group").resolve("best_of_group", {"marg": 1})
    with pytest.raises(Refused, match=r"one of `agro objectives`.*'best'"):
        get("best")


def test_what_a_package_named_like_those_of_agro_does_wrong_is_refused(tmp_path, monkeypatch) -> None:
    """Installed in the same folder as agro, too: by another distribution."""
    (tmp_path / "agro_mine.py").write_text("def get(item):\n    return item.score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("agro_mine").get
    found = {"agro": ["agro-rl"], "agro_papers": ["agro-rl"], "agro_mine": ["mine"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: found)
    with (
        pytest.raises(Refused, match=r"mine: AttributeError: .*agro_mine.py:2"),
        plugins.errors_of(mine, "mine"),
    ):
        mine(1)
    for module, is_agros in (("agro.io.x", True), ("agro_papers.x", True), ("agros", False), ("mine", False)):
        assert plugins.is_agros(type("Part", (), {"__module__": module})) == is_agros


SEVERAL = """
from pathlib import Path
from agro.objectives.table import with_methods
from best_of_group import BEST_OF_GROUP

OBJECTIVES = with_methods({"mine": BEST_OF_GROUP}, Path(__file__).with_name("methods.toml"))
TWICE = {"rloo": BEST_OF_GROUP}
CLAIMS = "their_claims:CLAIMS"
"""
METHODS = """
mine.title = "Ours."
wide.preset = { of = "mine", source = "us", options = { margin = 0.5 } }
less.preset = { of = "rloo", source = "us", options = { beta = 0.5 } }
"""


def test_a_package_of_several_has_presets_recipes_and_claims(install: Install, tmp_path: Path) -> None:
    """Claims are imported where they are asked for alone."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "their_objectives.py").write_text(SEVERAL)
    (folder / "their_claims.py").write_text("CLAIMS = {'mine': ('claimed',)}\n")
    (folder / "methods.toml").write_text(METHODS)
    install(FOLDER / "objective", {})
    install(folder, {"agro.objectives": {"theirs": "their_objectives:OBJECTIVES"}})
    assert {"mine", "wide", "less"} <= set(names())
    assert "theirs" not in names()
    assert (get("wide").defaults()["margin"], get("less").defaults()["beta"]) == (0.5, 0.5)
    assert (get("wide").of, get("mine").of, recipes.get("mine").title) == ("imitate_best", "", "Ours.")
    assert "their_claims" not in sys.modules
    assert claims_of("mine") == ("claimed",)
    with pytest.raises(Refused, match=r"nothing is claimed of wide\. .* whose key 'wide'"):
        claims_of("wide")
    install(tmp_path / "again", {"agro.objectives": {"again": "their_objectives:TWICE"}})
    with pytest.raises(Refused, match=r"objectives of again, .*: objective rloo already exists"):
        names()


def test_an_installed_environment_is_used_by_its_name(install: Install) -> None:
    folder = FOLDER.parent / "environments"
    install(folder, {"agro.environments": {"spelling": "spelling:Spelling"}})
    of_file = make_environment(f"{folder / 'spelling.py'}:Spelling", {})
    assert make_environment("spelling", {}).name == of_file.name
    with pytest.raises(Refused, match="expected spelling, harness, verifiers:ENV_ID"):
        make_environment("speling", {})


def test_a_name_that_is_taken_is_refused(install: Install) -> None:
    folder, _ = of_example("reward")
    install(folder, {"agro.rewards": {"exact": "polite_rewards:politeness"}})
    with pytest.raises(Refused, match=r"exact is agro's own name.*polite_rewards:politeness"):
        values("politenes")
