"""`source.sync_every`: the sampler keeps its weights for some optimizer steps, exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import StopAfter, logp_rounding, metrics, tiny, weights, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.models.published import load_published
from agro.rollout.collect import Activity
from agro.store import Store
from agro.store.shared import LocalFolder
from agro.train.phases import Phase
from agro.train.publications import Publications
from agro.train.source import CollectorSource


def staleness(run: Path) -> list[float]:
    return [row["staleness_mean"] for row in metrics(run) if row["step"]]


def synced(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "weights" / "synced").iterdir())


def test_the_sampler_is_behind_by_up_to_so_many_steps_less_one(tmp_path: Path) -> None:
    run = Trainer(tiny(tmp_path, source__sync_every=3), tmp_path / "run").run()
    assert staleness(run) == [0, 1, 2, 0, 1, 2]


def test_it_counts_optimizer_steps(tmp_path: Path) -> None:
    """Three updates a step: before step s the version is 3 (s − 1)."""
    config = tiny(tmp_path, source__sync_every=6, train__updates=3)
    assert staleness(Trainer(config, tmp_path / "run").run()) == [0, 3, 0, 3, 0, 3]


def test_samples_have_version_and_log_probs_of_the_weights_that_sampled(tmp_path: Path) -> None:
    config = tiny(tmp_path, source__sync_every=4)
    run = Trainer(config, tmp_path / "run", monitors=[StopAfter(4)]).run()
    start = load_published(config.policy, run / "weights" / "synced" / "v00000000")
    with Store.open(run / "store.db", read_only=True) as store:
        samples = list(store.samples())[-12:]
    assert samples
    for sample in samples:
        assert sample.version == 0
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        mask = torch.tensor(sample.action)[None]
        logp = start.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][mask]
        assert logp.detach().numpy() == pytest.approx(
            sample.behavior_logp[sample.action], abs=logp_rounding(run)
        )


def test_with_one_it_is_a_run_without_a_lag(tmp_path: Path) -> None:
    plain = Trainer(tiny(tmp_path), tmp_path / "plain").run()
    one = Trainer(tiny(tmp_path, source__sync_every=1), tmp_path / "one").run()
    assert weights(plain) == weights(one)
    assert not (one / "weights" / "synced").exists()


@pytest.mark.parametrize(
    ("every", "at"),
    [(2, 3), (5, 4), *(pytest.param(e, a, marks=pytest.mark.nightly) for e in (2, 3, 5) for a in (1, 2, 5))],
)
def test_a_resumed_run_has_the_same_lag_and_ends_with_the_same_bytes(
    tmp_path: Path, every: int, at: int
) -> None:
    """Checkpoints are at steps 2, 4 and 6, and where it is interrupted."""
    whole, run = whole_and_resumed(lambda folder: tiny(folder, source__sync_every=every), tmp_path, at)
    assert staleness(run) == staleness(whole)


def test_weights_that_no_checkpoint_continues_with_are_removed(tmp_path: Path) -> None:
    """When the weights of version 6 are synced, the checkpoints are those of versions 2 and 4."""
    run = Trainer(tiny(tmp_path, source__sync_every=2, train__keep=2), tmp_path / "run").run()
    assert synced(run) == ["v00000002", "v00000004", "v00000006"]


def test_beta_matters_to_an_anchor_at_the_behavior_only_with_a_lag(tmp_path: Path) -> None:
    """OAPL is (β log π/μ − (r − V))²: where π = μ, β scales the gradient alone, which Adam undoes."""

    def trained(beta: float, every: int) -> Any:
        config = tiny(
            tmp_path,
            objective={"name": "oapl", "beta": beta},
            source__sync_every=every,
            train__steps=8,
            train__adam_eps=1e-30,
            train__clip=1e9,
        )
        run = Trainer(config, tmp_path / f"{beta}-{every}").run()
        return torch.cat([w.flatten() for w in load_file(run / "model" / "model.safetensors").values()])

    def moved(every: int) -> float:
        return (trained(0.05, every) - trained(0.5, every)).abs().max().item()

    assert moved(8) > 10 * moved(1)


def test_collectors_keep_their_weights_too(tmp_path: Path) -> None:
    """What the trainer publishes at its versions 0 to 5, of which 0 and 3 are new."""
    config = tiny(tmp_path, source__kind="elsewhere", source__sync_every=3)
    publications = Publications(LocalFolder(tmp_path))
    with Store.open(tmp_path / "store.db") as store:
        source = CollectorSource(Phase.all(config)[0], store, "run", publications, Activity())
        published = []
        for version in range(6):
            write = partial(Path.mkdir, parents=True)
            source.publish(SimpleNamespace(version=version, publish=write))
            published.append(publications.newest().version)
    assert published == [0, 0, 0, 3, 3, 3]
    assert sorted(f.name for f in (tmp_path / "weights").glob("v*")) == ["v00000000", "v00000003"]
