"""The Python interface: `agro.train` takes objects and returns the finished run.

`agro.api.trl` and `agro.api.verl` bring agro's objective to other libraries' trainers; each needs its
library.
"""

from __future__ import annotations

import html
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agro.api.arguments import (
    Function,
    RewardArgument,
    check_pooled,
    choose,
    configured,
    is_path,
    lora_of,
    model_folder,
    put,
    reward_values,
    write_rows,
)
from agro.api.fit import Limits
from agro.api.fit import fit as fit_run
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.config.aliases import say, without_aliases
from agro.config.recipes import HELD_OUT
from agro.errors import Refused
from agro.io.files import new_run_folder, remove
from agro.io.record_files import has_several_tables
from agro.io.terminal import plain
from agro.logs.guessing import Proposal, propose_unknown
from agro.logs.guessing import propose as look_at
from agro.logs.importing import import_files
from agro.logs.reading import Options
from agro.models.policy import Policy
from agro.pages.run.card import push
from agro.pages.run.evaluation import summary
from agro.rewards import load_reward
from agro.rollout.evaluate import heldout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import EpisodeReward, embedded, load_rollout
from agro.runs.folder import SET_ASIDE
from agro.runs.rundata import load_run
from agro.store import Store
from agro.store.location import exists, is_store, located
from agro.train.process_group import world_size
from agro.types import Prompt, Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["Proposal", "Trained", "propose", "train"]

CONFIRM = (
    "What to do: check that the upper ones are better. Then pass log_map=agro.propose(log) (as proposed), "
    "log_map=agro.propose(log).reversed() (the lower ones are better), lower_is_better=True, log_map="
    'agro.propose(log, reward="COLUMN"), or your own: {"prompt": …, "response": …, "reward": …}'
)


def train(
    model: Any = None,
    prompts: Any = None,
    reward: RewardArgument = None,
    log: Any = None,
    objective: str = "agro",
    *,
    tokenizer: Any = None,
    eval_prompts: Any = None,
    log_map: Mapping[str, str] | Proposal | None = None,
    lower_is_better: bool = False,
    peft: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    accept: Sequence[str] = (),
    fit: str | Sequence[str] | None = None,
    **settings: Any,
) -> Trained:
    """Train a model on Python objects, files or stores, and return the run.

    Writes objects to OUT/inputs, so that OUT/config.json repeats the run. Raises `Refused`, before any
    compute, if the inputs can't be trained on.

    Args:
        model: a folder, a hub name, `(model, tokenizer)`, or a transformers model with `tokenizer`. A model
            object is copied, never changed. Without a model, `policy__new` describes a new one.
        prompts: a path, a list of texts, messages or dictionaries, a `datasets.Dataset` or a DataFrame. A
            store passed here is used as the log.
        reward: the name of a reward, "file.py:function", a function, or a dictionary from these to weights. A
            function that can't be imported, such as a lambda or one defined in a notebook, runs in this
            process without a time limit, and `agro train OUT/config.json` can't find it.
        log: responses to learn from: paths of any format, a store, or rows like `prompts`. With a log and
            without prompts, all groups come from the log (`data.replay` = 1).
        objective: one of `agro.objectives.names()`, or your own as file.py:NAME.
        tokenizer: the tokenizer of a model object.
        eval_prompts: held-out prompts, like `prompts`. Without them a tenth of the prompts is held out, at
            most 128, and none if there are fewer than 200 (`data__hold_out=0`: none).
        log_map: a column of the log for each field, such as {"response": "output"}, see `agro import --map`;
            or the result of `agro.propose(log)`. A log of unknown format is refused without either.
        lower_is_better: negate the log's rewards, and swap the winner and the loser of each pair.
        peft: a `peft.LoraConfig`, to train an adapter.
        out: the run folder; by default a folder in runs/ named by the time.
        resume: continue the run in `out`.
        accept: with `resume`, inputs that may have changed since the run began, such as "reward.name".
        fit: "30min" or "24GB", or a list of both: choose and report the settings that you leave open, so that
            the run fits this machine; see `agro train --fit`; not with `resume`.
        settings: options of the objective (`beta=0.1`), and any value of the configuration with its section
            (`train__steps=20`, or `**{"train.steps": 20}`); also TRL's names of common ones, such as
            `num_generations`, `reward_funcs` and `train_dataset`. A missing β is chosen from the rewards and
            the response lengths, a missing learning rate at the first step. Both choices are reported.
    """
    arguments = {"prompts": prompts, "reward": reward, "log": log, "out": out, "objective": objective}
    _move_trl_names(settings, arguments)
    prompts, reward, log, out, objective = arguments.values()
    if world_size() > 1:
        raise Refused("agro.train runs in one process: for torchrun, write a recipe and use agro train")
    folder = Path(out) if out is not None else new_run_folder()
    functions: dict[str, Function] = {}
    values = without_aliases(configured(objective, settings), "agro.train", RunConfig)
    pinned = {f"{name}.{key}" for name, part in values.items() if isinstance(part, Mapping) for key in part}
    put(values, "reward", reward_values(reward, functions))
    check_pooled(values["reward"], functions)
    if peft is not None:
        put(values, "policy.lora", lora_of(peft))
    RunConfig.of(values, "agro.train")  # a wrong setting is refused before anything is written
    _prepare(folder, fit, resume=resume)
    if model is not None:
        put(values, "policy.model", model_folder(model, tokenizer, folder / "inputs/model"))
    for key, data in (("prompts", prompts), ("eval_prompts", eval_prompts)):
        if data is not None:
            file = data if is_path(data) else write_rows(data, folder / f"inputs/{key}.jsonl", key)
            put(values, f"data.{key}", file)
    if log is not None:
        _take_log(log, log_map, lower_is_better, folder, values)
    if HELD_OUT.keys().isdisjoint(values.get("data", {})):
        put(values, "data", HELD_OUT)
    chosen = choose(values)
    for key, value in chosen.settings.items():
        put(values, key, value)
    for note in chosen.notes:
        print(f"note: {note}; set it to choose another", file=sys.stderr)
    config = RunConfig.of(values, "agro.train")
    if fit is not None:
        fitted = fit_run(config, Limits.parse(fit), pinned, folder, functions)
        print("\n".join(fitted.lines()), file=sys.stderr)
        config = fitted.config
    trainer = Trainer(config, folder, resume=resume, rewards=functions, accept=accept)
    trainer.forecasts = fit is None
    trainer.run()
    return Trained(folder, functions)


TRL_NAMES = {"train_dataset": "prompts", "loss_type": "objective", "reward_funcs": "reward"}


def _move_trl_names(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Move settings with TRL's names to the arguments. A store passed as prompts becomes the log."""
    for trl_name, name in TRL_NAMES.items():
        value = settings.pop(trl_name, None)
        if value is None:
            continue
        if trl_name == "train_dataset" and _is_stored(value):
            name = "log"
        elif trl_name == "reward_funcs" and isinstance(value, list | tuple):  # TRL adds their rewards
            value = value[0] if len(value) == 1 else dict.fromkeys(value, 1.0)
        is_default = name == "objective" and arguments[name] == "agro"
        if arguments[name] is not None and not is_default:
            raise Refused(f"{trl_name} is {name} here, which is given too; leave one out")
        say(trl_name, name)
        arguments[name] = value
    if _is_stored(arguments["prompts"]):
        if arguments["log"] is not None:
            store = _store_of(arguments["prompts"])
            raise Refused(f"prompts: expected prompts next to the log, got {store}, a store; leave one out")
        arguments |= {"prompts": None, "log": arguments["prompts"]}


def _is_stored(data: Any) -> bool:
    return isinstance(data, Store) or (is_path(data) and has_several_tables(Path(data)))


def _prepare(folder: Path, fit: str | Sequence[str] | None, *, resume: bool) -> None:
    """Remove the files of an attempt that was refused before its run began; refuse another run's folder."""
    if resume:
        if fit is not None:
            raise Refused(
                "fit: it chooses settings for a new run, but resume=True continues one. What to do: omit it, "
                f"and pass the settings that it chose, as {folder}/config.json has them"
            )
        return
    if (folder / "metrics.jsonl").exists():
        raise Refused(f"{folder}: there is a run in this folder; continue it with resume=True, or set out")
    if (folder / "inputs").exists():
        for name in ("inputs", "store.db", "store.db-wal", "store.db-shm"):
            remove(folder / name)


def _store_of(log: Any) -> str | None:
    """The path of a store; None for any other log."""
    if isinstance(log, Store):
        return str(log.path)
    return str(log) if is_path(log) and is_store(Path(log)) else None


def propose(log: Any, reward: str | None = None, *, lower_is_better: bool | None = None) -> Proposal | None:
    """Propose how to read a log of unknown format, for `log_map` of `agro.train`. Print the proposal, and
    check that its best responses really are the best. None for a log of a known format.

    Args:
        log: a path, or rows as in `agro.train`.
        reward: the column that judges the responses, if the proposed one is wrong.
        lower_is_better: whether lower values of it are better; None: propose it. `.reversed()` is the
            opposite.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(_log_files(log, Path(folder) / "log.jsonl")[0])
        return look_at(path, reward=reward, lower_is_better=lower_is_better)


def _take_log(
    log: Any,
    log_map: Mapping[str, str] | Proposal | None,
    lower_is_better: bool,
    folder: Path,
    values: dict[str, Any],
) -> None:
    """Set `data.store`: the log if it is a store, else the run's store, into which the log is imported."""
    data = values.setdefault("data", {})
    if "replay" not in data:
        if "prompts" in data:
            raise Refused(
                "data__replay: expected the share of each step's groups that comes from the log, between 0 "
                "and 1, for a run with both prompts and a log; got none"
            )
        data["replay"] = 1.0
    store = _store_of(log)
    if store is not None:
        if log_map is not None or lower_is_better:
            name = "lower_is_better" if log_map is None else "log_map"
            raise Refused(f"{name}: {store} is a store, whose columns have agro's names; leave it out")
        put(values, "data.store", store)
        return
    path = folder / "store.db"
    if path.exists() and not (folder / "inputs").exists():
        raise Refused(f"{path}: this store exists already; pass it as the log, or set another out")
    files = _log_files(log, folder / "inputs/log.jsonl")
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    options: Options = {"mapping": log_map} if isinstance(log_map, Mapping) else {}
    proposal = log_map if isinstance(log_map, Proposal) else None
    if log_map is None:
        proposal = propose_unknown(Path(files[0]), lower_is_better=lower_is_better or None)
    if proposal is not None:
        is_confirmed = log_map is not None or lower_is_better
        if not is_confirmed or not proposal:
            raise Refused(f"log: nothing is imported until you confirm this proposal\n{proposal}\n{CONFIRM}")
        print(proposal, file=sys.stderr)
        options = proposal.options()
    if lower_is_better:
        options["lower_is_better"] = True
    with Store.open(path) as opened:
        print(import_files(opened, files, **options), file=sys.stderr)
    put(values, "data.store", path)


def _log_files(log: Any, path: Path) -> list[str | Path]:
    """The paths of a log, or `path`, to which its rows are written."""
    if is_path(log):
        return [log]
    if isinstance(log, list | tuple) and all(map(is_path, log)):
        return list(log)
    return [write_rows(log, path, "log")]


HEIGHT = 800  # pixels of the page in a notebook


class Trained:
    """A finished run. A notebook displays it as the run's page.

    `rewards`: reward functions that only this process has, by their names in the configuration.
    """

    def __init__(self, folder: str | Path, rewards: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.folder = Path(folder)
        self.config = RunConfig.load(self.folder / "config.json")
        self._rewards = dict(rewards or {})

    def __repr__(self) -> str:
        return f"Trained({str(self.folder)!r})"

    @property
    def metrics(self) -> Any:
        """One row per step: a pandas DataFrame if pandas is installed, else a list of dictionaries."""
        rows = load_run(self.folder).rows
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """Plot training and held-out reward against steps, as on the page.

        Raises `Refused` if no step has a reward.
        """
        from agro.pages.run.figures import learning_curve

        run = load_run(self.folder)
        if not np.isfinite([run.column("reward_mean"), run.column("eval_reward")]).any():
            raise Refused(f"{run.folder}: no step has a reward, so there is nothing to plot")
        return learning_curve(run)

    @cached_property
    def _policy(self) -> Policy:
        changes = {"model": str(self.folder / "model"), "new": None, "lora": None}
        return Policy.load(self.config.policy.model_copy(update=changes))

    @property
    def model(self) -> Any:
        """The trained transformers model, loaded from RUN/model with any adapter merged."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        return self._policy.tokenizer

    @cached_property
    def store(self) -> Store:
        """The run's store, opened for reading."""
        return Store.open(located(self.config.data.store, self.folder), read_only=True)

    def evaluate(
        self, prompts: Any = None, n: int = 8, *, temperature: float = 1.0, seed: int = 0
    ) -> dict[str, Any]:
        """Measure mean reward, accuracy and pass@k with 95% intervals, as `agro eval --json`.

        Args:
            prompts: as for `agro.train`; by default the run's held-out prompts.
            n: responses per prompt.
            temperature: sampling temperature; 0 is greedy.
            seed: sampling seed.
        """
        if not isinstance(n, int) or n < 1:
            raise Refused(f"n: expected 1 or more responses per prompt, got {n!r}")
        if prompts is None:
            loaded = held_out_prompts(self.folder, self.config)
            if not loaded:
                raise Refused("prompts: expected some, since the run has no held-out prompts; got none")
        elif is_path(prompts):
            loaded = load_prompts(prompts)
        else:
            with tempfile.TemporaryDirectory() as folder:
                loaded = load_prompts(write_rows(prompts, Path(folder) / "prompts", "prompts"))
        policy, sampler = self._policy, self.config.sampler.of_policy(temperature, n)
        engine = embedded(policy, fused=self.config.engine.fused)
        rollout = load_rollout(policy.encoder, engine, self.config.environment)
        with closing(EpisodeReward(load_reward(self.config.reward, self._rewards))) as reward:
            result = heldout(rollout, reward, loaded, sampler, seed)
            if result.is_unknown:
                raise Refused(f"none of the responses could be scored, such as by: {result.errors[0]}")
            configured = self.config.evaluate.pass_at
            measured = summary(result, reward.maximum if configured is None else configured)
        return {"prompts": len(loaded), "n": n, "temperature": temperature, **measured}

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """Upload RUN/model to USER/NAME on the Hugging Face hub and return its address."""
        train = self.config.train.model_copy(update={"push": repo, "push_private": private})
        address = push(self.folder / "model", train)
        assert address is not None
        return address

    def _repr_html_(self) -> str:
        """Return the page in an iframe, which isolates its styles."""
        page = self.folder / "report.html"
        if not page.exists():
            return f"<p>{html.escape(repr(self))}: the run has no page yet</p>"
        content = html.escape(page.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{content}" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'


def held_out_prompts(run: Path, config: RunConfig) -> list[Prompt]:
    """Load `data.eval_prompts`, or the prompts that the run set aside; empty if there are none. Call it in
    the directory where the run was started, since its configuration has relative paths."""
    if config.data.eval_prompts:
        return load_prompts(config.data.paths("eval_prompts"), config.data.columns)
    return load_prompts(run / SET_ASIDE) if (run / SET_ASIDE).exists() else []


def trained_prompts(run: Path, config: RunConfig) -> list[Text]:
    """Load the prompts of `data.prompts`, and those of the run's store that aren't held out. Call it in the
    directory where the run was started."""
    files = [path for path in config.data.paths("prompts") if path.startswith("hub:") or Path(path).exists()]
    texts = [prompt.text for prompt in load_prompts(files, config.data.columns)] if files else []
    store = located(config.data.store, run.absolute())
    if exists(store):
        with Store.open(store, read_only=True) as opened:
            is_held_out = opened.split.held_out(config.data)
            texts += [text for prompt_id, text in opened.survey.each_prompt() if not is_held_out(prompt_id)]
    return list({plain(text): text for text in texts}.values())
