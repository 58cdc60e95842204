"""What came of a run, as objects."""

from __future__ import annotations

import html
import io
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agro.api.arguments import is_path, prompt_record, write_rows
from agro.api.contamination import held_out_prompts
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rewards import load_reward
from agro.rollout.evaluate import heldout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import EpisodeReward, embedded, load_rollout
from agro.runs.card import check_push, push
from agro.runs.rundata import load_run
from agro.store import Store
from agro.store.location import located

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT = 800  # of the page in a notebook, pixels


class Trained:
    """The run in a folder. In a notebook it shows the run's page.

    `rewards`: functions by their names in the configuration, where only this process has them.
    """

    def __init__(self, folder: str | Path, rewards: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.folder = Path(folder)
        self.config = RunConfig.load(self.folder / "config.json")
        self._rewards = dict(rewards or {})

    def __repr__(self) -> str:
        return f"Trained({str(self.folder)!r})"

    @property
    def metrics(self) -> Any:
        """One row a step: a pandas DataFrame where pandas is installed, else a list of dictionaries."""
        rows = load_run(self.folder).rows
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """Training and held-out reward, and KL to the reference, against steps: what was measured of them.

        Raises `Refused` where nothing was.
        """
        from matplotlib.figure import Figure

        from agro.pages.run.figures import FIRST, FONT, INK, SECOND, WIDE, style_axes

        class NotebookFigure(Figure):
            """A notebook shows it without `%matplotlib inline`."""

            def _repr_png_(self) -> bytes:
                buffer = io.BytesIO()
                self.savefig(buffer, format="png", dpi=120, facecolor="white")
                return buffer.getvalue()

        run = load_run(self.folder)
        panels = {
            "reward": (run.column("reward_mean"), run.column("eval_reward")),
            "KL, nats per response": (run.training_kl, run.column("eval_kl_ref")),
        }
        shown = {title: both for title, both in panels.items() if np.isfinite(both).any()}
        if not shown:
            raise Refused(f"{run.folder}: no step has a reward or a KL, so there is nothing to draw")
        figure = NotebookFigure(figsize=WIDE, layout="constrained")
        subplots = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, (title, (training, held_out)) in zip(subplots, shown.items()):
            style_axes(axes)
            axes.set_title(title, loc="left", fontsize=FONT, color=INK)
            axes.set_xlabel("step", fontsize=FONT, color=INK)
            dots = {"label": "held-out", "color": SECOND, "marker": "o", "markersize": 3.6}
            for values, style in ((training, {"label": "training", "color": FIRST}), (held_out, dots)):
                known = np.isfinite(values)
                if known.any():
                    axes.plot(run.column("step")[known], values[known], linewidth=1.4, **style)
            axes.legend(frameon=False, fontsize=FONT)
        return figure

    @cached_property
    def _policy(self) -> Policy:
        changes = {"model": str(self.folder / "model"), "new": None, "lora": None}
        return Policy.load(self.config.policy.model_copy(update=changes))

    @property
    def model(self) -> Any:
        """The trained model of transformers, loaded from RUN/model; an adapter is merged into it."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        return self._policy.tokenizer

    @cached_property
    def store(self) -> Store:
        """The run's store, to read from."""
        return Store.open(located(self.config.data.store, self.folder), read_only=True)

    def evaluate(
        self, prompts: Any = None, n: int = 8, *, temperature: float = 1.0, seed: int = 0
    ) -> dict[str, Any]:
        """Mean reward, accuracy and pass@k of the model with 95 % intervals, as `agro eval --json`.

        Args:
            prompts: as of `agro.train`; the run's held-out prompts where they aren't given.
            n: responses a prompt.
            temperature: of the responses; 0 is greedy.
            seed: of the responses.
        """
        if not isinstance(n, int) or n < 1:
            raise Refused(f"n: expected 1 or more responses a prompt, got {n!r}")
        if prompts is None:
            loaded = held_out_prompts(self.folder, self.config)
            if not loaded:
                raise Refused("prompts: expected some, since the run has no held-out prompts; got none")
        elif is_path(prompts):
            loaded = load_prompts(prompts)
        else:
            with tempfile.TemporaryDirectory() as folder:
                loaded = load_prompts(write_rows(prompts, Path(folder) / "prompts", "prompts", prompt_record))
        policy, sampler = self._policy, self.config.sampler.of_policy(temperature, n)
        engine = embedded(policy, fused=self.config.engine.fused)
        rollout = load_rollout(policy.encoder, engine, self.config.environment)
        with closing(EpisodeReward(load_reward(self.config.reward, self._rewards))) as reward:
            result = heldout(rollout, reward, loaded, sampler, seed)
            if result.is_unknown:
                raise Refused(f"none of the responses could be scored, such as by: {result.errors[0]}")
            configured = self.config.evaluate.pass_at
            measured = result.to_json(reward.maximum if configured is None else configured)
        return {"prompts": len(loaded), "n": n, "temperature": temperature, **measured}

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """Upload RUN/model to USER/NAME on the Hugging Face hub, and return its address."""
        train = self.config.train.model_copy(update={"push": repo, "push_private": private})
        check_push(train)
        address = push(self.folder / "model", train)
        assert address is not None
        return address

    def _repr_html_(self) -> str:
        """The page, in a frame of its own, since it has styles of its own."""
        page = self.folder / "report.html"
        if not page.exists():
            return f"<p>{html.escape(repr(self))}: the run has no page yet</p>"
        content = html.escape(page.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{content}" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'
