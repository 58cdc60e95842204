"""Turns a configuration into a run: loads and checks everything, and builds the loop's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

from agro.config import RunConfig
from agro.io.files import new_run_folder
from agro.io.processes import cores
from agro.models.policy import Policy
from agro.models.pretrained import LARGE, parameters, positions_of
from agro.models.reference import load_reference
from agro.objectives.ingredients import MEASURED
from agro.objectives.needs import provided_by
from agro.rewards import Reward, load_reward
from agro.rollout import Rollout
from agro.rollout.engines import capabilities, declared
from agro.rollout.envs.process import load_environment
from agro.rollout.rollout import EpisodeReward, load_engine
from agro.runs.folder import STAGE, Run, check_out
from agro.runs.progress import RunActivity
from agro.runs.track import Trackers, check_trackers
from agro.store import Store
from agro.store.location import Location, located
from agro.store.shared import leased, trainer_of
from agro.store.split import Clusters, write_clusters
from agro.train import inputs
from agro.train.around import CheckedSource, Context, put_around
from agro.train.check import (
    check_config,
    check_heldout,
    check_sharded,
    follows_log,
    notes_on_settings,
    samples_kl,
    unscored,
)
from agro.train.collate import StoredValues, TrackedValues, recording
from agro.train.feed import Feed
from agro.train.learner import Learner, keep_best, save_model
from agro.train.loop import Loop
from agro.train.monitors import Monitor, Record, Terminal, heldout
from agro.train.monitors.guard import Best, Guard, Signal, Warnings
from agro.train.phases import Phase, Position, derive, describe, resolve
from agro.train.process_group import Watch, connect, joined, rank, take_device, world_size
from agro.train.publications import Publications
from agro.train.source import (
    CollectorSource,
    InlineSource,
    LaggingSource,
    PromptOrder,
    Source,
    UncertainOrder,
    without_hint,
)
from agro.train.trainable import check_enough, check_store, check_stores, drawn_groups
from agro.types import Prompt


def notes(policy: Policy, prompts: Sequence[Prompt], config: RunConfig) -> list[str]:
    """Notes on the model and the prompts before the first step."""
    texts, count = sum(isinstance(p.text, str) for p in prompts), parameters(policy.model)
    positions, on_gpu = positions_of(policy.model), policy.device.type == "cuda"
    is_large = config.policy.threads == "auto" and count >= LARGE and policy.device.type == "cpu"
    rows = {
        f"{texts} of {len(prompts)} prompts are plain text without a chat template, though the tokenizer has "
        "one; policy.chat.wrap = true turns them into user messages": texts
        and policy.tokenizer.chat_template
        and not config.policy.chat.wrap,
        f"the context is {policy.context} of the model's {positions} tokens: in longer passes, LongRoPE "
        "changes the log-probs of all sequences": policy.context < positions,
        f"engine.kind = {config.engine.kind} decodes on the GPU operation by operation, without CUDA graphs; "
        "engine.kind = vllm starts vLLM, which samples faster": (
            on_gpu and "shares_weights" in capabilities(config.engine.kind)
        ),
        f"policy.threads = auto: {cores()} CPU threads for {count / 1e6:.0f} million parameters. With "
        "another number of threads the last bits of the weights differ": is_large,
    }
    return [note for note, applies in rows.items() if applies]


class BaseTrainer:
    """Trains according to `config`, in the run folder `out` (default: runs/ and the time).

    `monitors` observe each step in addition to the run's own. `rewards`: functions by their names in the
    configuration, which are called in this process. After `run`, `policy` is the trained policy, with its
    last weights; RUN/model has their average if `train.weights_average` is set.
    """

    policy: Policy
    reference: Policy | None
    store: Store
    folder: Run
    trackers: Trackers
    activity: RunActivity
    ended_well = True  # after `run`: whether no problem outweighs the measured result

    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        monitors: Sequence[Monitor] = (),
        rewards: Mapping[str, Callable[..., Any]] | None = None,
        accept: Sequence[str] = (),
    ) -> None:
        check_trackers(config.track)
        check_out(out, resume=resume, accept=accept)
        self.out = Path(out) if out is not None else new_run_folder()
        self.location: Location = located(config.data.store, self.out)  # of the store
        self.budget = inputs.within_budget(config, self.location, self.out, resume=resume)
        self.phases = check_config(self.budget.config)
        self.config, self.epochs = resolve(self.budget.config, self.phases, self.out, resume=resume)
        if self.epochs:
            self.phases = check_config(self.config)
        self.resume, self.monitors, self.rewards, self.accept = resume, monitors, rewards or {}, accept

    def run(self) -> Path:
        """Run to the end and return the run folder. Raises `Refused` before any compute for invalid data."""
        if world_size() == 1:
            self._run()
            return self.out
        check_sharded(self.config)
        take_device()
        with Watch(self.config.train.rank_seconds, rank(), world_size(), connect) as self.watch:
            if rank() == 0:
                self._run()
                return self.out
            from agro.train.ranks import Shard, serve

            policy = self._load_policy()
            with joined(policy.device) as mesh, self.watch.naming():
                serve(Shard(policy, self._load_reference(policy), lambda text: None, mesh))
        return self.out

    def _run(self) -> None:
        self._prepare()
        try:
            self.policy, self.reference = self._load()
            digests = inputs.fingerprints(self.config, self.policy, self.reference, self.rewards)
            resume, accept, epochs = self.resume, self.accept, self.epochs
            self.folder = Run(
                self.out, self.config, resume=resume, inputs=digests, accept=accept, epochs=epochs
            )
            seconds = self.config.guard.stage_seconds
            self.activity = RunActivity(self.phases[-1].ends, seconds, self.out / STAGE)
            self.trackers = Trackers.of(self.config, self.folder, self.activity.say)
            with (
                closing(self.folder),
                closing(self.trackers),
                Store.open(self.location) as self.store,
                self.activity,
            ):
                self._train()
        finally:
            with suppress(OSError):  # no folder was created, or its disk is full
                (self.out / STAGE).unlink()
            with ExitStack() as closed:  # closes all of them, even if one raises
                for opened in (self.reward, self.__dict__.get("engine"), *self.monitors):
                    if opened is not None:
                        closed.callback(opened.close)

    def _prepare(self) -> None:
        """Load and check everything that is cheap."""
        config, data, path = self.config, self.config.data, self.location
        self.prompts, self.notes = inputs.configured_prompts(data, "prompts")
        self.eval_prompts, repeated = inputs.configured_prompts(data, "eval_prompts")
        self.set_aside: list[Prompt] = []  # held-out prompts that the models answer
        self.clusters: Clusters = {}
        self.notes += self.budget.notes
        if data.hold_out:
            resumed = self.out if self.resume else None
            split = inputs.hold_out(config, self.prompts, path, resumed, self.budget)
            self.prompts, self.set_aside, self.clusters, more = split
            if config.asks_held_out and data.eval_prompts is None:
                self.eval_prompts = self.set_aside
            repeated += more
        self.notes += [*repeated, *notes_on_settings(self.phases)]
        check_heldout([p.id for p in self.prompts], [p.id for p in self.eval_prompts])
        check_stores(self.phases, self.prompts, path, self.clusters)
        check_enough(self.phases, path, clusters=self.clusters)
        self.values: StoredValues | None = None
        if data.value_store:
            valued = inputs.valued_prompts(self.phases, self.prompts, path)
            self.values = StoredValues.load(data.value_store, valued)
        named = {phase.name: phase.config.environment for phase in self.phases}
        self.environments = {name: load_environment(e) for name, e in named.items() if e is not None}
        self.reward: Reward | None = None
        if config.scores:
            self.reward = load_reward(config.reward, self.rewards)
            if self.environments:
                self.reward = EpisodeReward(self.reward)
            key = "eval_prompts" if data.eval_prompts else "hold_out"
            scored = {"prompts": self.prompts, key: self.eval_prompts}
            self.notes += inputs.check_scorable(self.reward, scored, config.reward.max_failed)

    def _load(self) -> tuple[Policy, Policy | None]:
        """Load policy and reference, and drop the prompts that the policy can't encode."""
        policy, data = self._load_policy(), self.config.data
        self.prompts, dropped = inputs.valid_prompts(self.prompts, policy.encoder, data, "prompts")
        if self.set_aside:  # invalid prompts of these are dropped without a refusal
            drop = data.model_copy(update={"invalid_prompts": "drop"})
            self.set_aside, more = inputs.valid_prompts(self.set_aside, policy.encoder, drop, "hold_out")
            self.eval_prompts = self.set_aside if self.eval_prompts else []
        else:
            held_out = self.eval_prompts
            self.eval_prompts, more = inputs.valid_prompts(held_out, policy.encoder, data, "eval_prompts")
        self.notes += [*dropped, *more, *(describe(name, e) for name, e in self.epochs.items())]
        return policy, self._load_reference(policy)

    def _load_policy(self) -> Policy:
        policy = Policy.load(self.config.policy, seed=derive(self.config.train.seed, "weights"))
        if any(provided_by("value_head", phase.needs) for phase in self.phases):
            policy.add_value()
        return policy

    def _load_reference(self, policy: Policy) -> Policy | None:
        """Load the reference if any phase needs it; it stays in memory for the complete run."""
        if not any(phase.reads_reference for phase in self.phases):
            return None
        config = self.phases[0].config
        if config.policy.reference_is_served:
            from agro.rollout.engines.connection import ServedReference

            return ServedReference(config, policy)
        return load_reference(config.policy, policy)

    def _train(self) -> None:
        say = self.activity.say
        if self.config.data.hold_out:
            self.store.split.use(self.clusters)
            write_clusters(self.out, self.clusters)
            if self.set_aside:
                inputs.write_set_aside(self.out, self.set_aside)
        for note in [*self.notes, *notes(self.policy, self.prompts, self.config), *self.folder.notes]:
            say(f"note: {note}")
        say(f"its page while it trains: agro report {self.out} --watch")
        with self._learner() as learner:
            self.best = Best(keep=partial(keep_best, learner, self.out, self.config.policy.lora))
            build = partial(self._parts, learner)
            loop = Loop(self.phases, learner, self.store, self.folder, self.activity, build)
            if self.config.source.kind == "elsewhere":
                self.publications.begin(self.folder.record, self.prompts)
                newest = self.publications.newest()
                with leased(self.location, trainer_of(self.folder.id), self.config.source.lease_seconds):
                    loop.run(published=newest.version if newest else 0)
                self.publications.end()
            else:
                loop.run()
            with learner.averaged():
                save_model(learner, self.out, self.config.policy.lora)

    @contextmanager
    def _learner(self) -> Iterator[Learner]:
        """Provide the learner, in this process or sharded over the ranks that torchrun started."""
        if world_size() == 1:
            yield Learner(self.policy, self.reference, self.activity.say)
            return
        from agro.train.ranks import Ranks, Shard

        with joined(self.policy.device) as mesh:
            shard = Shard(self.policy, self.reference, self.activity.say, mesh)
            assert shard.copy is not None
            self.engine = load_engine(self.config.engine, shard.copy, self.activity.say)
            with closing(Ranks(shard)) as learner, self.watch.naming():
                yield cast(Learner, learner)

    @cached_property
    def publications(self) -> Publications:
        return Publications.of(self.location, self.folder.id, self.out)

    @cached_property
    def engine(self) -> Any:
        settings = self.config.engine
        if settings.uses_servers:
            from agro.models.footprint import engine_settings

            has_reference = self.reference is not None
            settings = engine_settings(self.config, self.policy.device, has_reference=has_reference)
        return load_engine(settings, self.policy, self.activity.say)

    def _parts(self, learner: Learner, phase: Phase, position: Position) -> tuple[Feed, Sequence[Monitor]]:
        data, trained = phase.config.data, {p.id for p in self.prompts}
        if data.draws_stored:
            for note in check_store(phase, self.store):
                self.activity.say(f"{phase.name}: {note}")
            stored = {group.prompt_id for group in drawn_groups(data, self.store)}
            check_heldout(stored, [p.id for p in self.eval_prompts])
            trained |= stored
        values: StoredValues | TrackedValues | None = self.values
        if data.value_half_life is not None:
            values = TrackedValues(self.store, self.folder.id, learner, data.value_half_life)
        source, monitors = self._source(phase, position, values), self._monitors(phase, learner, trained)
        if isinstance(source, Monitor):  # so that checkpoints contain its state
            monitors = [source, *monitors]
        if phase.config.source.around is not None:
            source = CheckedSource(source, f"source.around = {phase.config.source.around}", self.store)
        run = self.folder.id
        feed = Feed(phase, source, learner, self.store, run, self.activity, values, position.cached)
        return feed, monitors

    def _source(
        self, phase: Phase, position: Position, values: StoredValues | TrackedValues | None
    ) -> Source:
        """Build the source of a phase's fresh samples, with its wrapper."""
        config, run = phase.config, self.folder.id
        inline: InlineSource | None = None
        source: Source
        if config.source.kind == "elsewhere":
            step = position.step
            source = CollectorSource(phase, self.store, run, self.publications, self.activity, step)
        else:
            seed = derive(config.train.seed, "prompts", phase.name)
            prompts = [without_hint(p) if "hint" in p.columns else p for p in self.prompts]
            order = PromptOrder(prompts, seed)
            if config.data.prompt_order == "uncertain":
                assert isinstance(values, TrackedValues)
                order = UncertainOrder(prompts, seed, config.data.candidates, values)
            # The folder of published versions, for an engine that doesn't share the policy's weights.
            weights = None if "shares_weights" in declared(self.engine) else self.out / "weights" / "served"
            recorded, rollout = recording(self.phases, phase), self._rollout(phase)
            source = inline = InlineSource(
                recorded, rollout, order, self.reward, self.store, run, self.activity, weights
            )
            if config.source.lags:
                source = LaggingSource(inline, self.folder)
        if config.source.around is None:
            return source
        context = Context(
            config,
            inline,
            lambda other: LaggingSource(other, self.folder) if config.source.lags else other,
            self.prompts,
            self.policy,
            self.store,
            self.folder,
            self.environments.get(phase.name),
            self.activity.say,
        )
        return put_around(source, context)

    def _rollout(self, phase: Phase) -> Rollout:
        environment = phase.config.environment
        turns = 1 if environment is None else environment.max_turns
        return Rollout(self.policy.encoder, self.engine, self.environments.get(phase.name), turns)

    def _monitors(self, phase: Phase, learner: Learner, trained: set[str]) -> list[Monitor]:
        """The run's own monitors, then those passed to the trainer, then those that write the metrics."""
        config, activity, say = phase.config, self.activity, self.activity.say
        shifts = config.objective.options.get("baseline_shift") == MEASURED
        other = None if "shares_weights" in capabilities(config.engine.kind) else learner
        monitors: list[Monitor] = [Guard(config.guard, phase.name, other, config.policy.temperature)]
        if self.eval_prompts:
            assert self.reward is not None
            rollout, prompts = self._rollout(phase), self.eval_prompts
            monitors.append(heldout.HeldOutPrompts(phase, learner, rollout, self.reward, prompts, activity))
            if shifts:
                monitors.append(heldout.MeasuredShift(self.store, say))
        elif shifts:
            say(f"{phase.name}: objective.baseline_shift: no reward measures the start, so there is none")
        if not self.eval_prompts:
            monitors += self._unscored(phase, learner)
        if config.data.has_held_out_groups:
            monitors += self._held_out_log(phase, learner, trained)
        monitors += [self.best, *self.monitors, Signal(phase, say), Warnings(say)]
        return [*monitors, Record(self.folder, self.trackers, self.store), Terminal(self.activity)]

    def _held_out_log(self, phase: Phase, learner: Learner, trained: set[str]) -> list[Monitor]:
        """Empty if no held-out prompt has two scored responses, unless a setting needs the measurement."""
        config, name = phase.config, phase.name
        try:
            log = heldout.HeldOutLog.load(phase, learner, self.activity, self.clusters)
        except heldout.NothingToRank:
            if config.data.eval_store or follows_log(config):
                raise
            self.activity.say(f"{name}: no held-out prompt has two scored responses, which could be ranked")
            return []
        check_heldout(trained, log.prompt_ids, "data.eval_store")
        clusters = len({self.clusters.get(prompt_id, prompt_id) for prompt_id in log.prompt_ids})
        measured = f"{len(log.prompt_ids)} stored groups are measured and not trained on"
        if clusters < len(log.prompt_ids):
            measured += f", in {clusters} clusters of near-copies"
        self.activity.say(f"{name}: {measured}")
        return [log]

    def _unscored(self, phase: Phase, learner: Learner) -> list[Monitor]:
        """Empty if no prompt leaves room for a response, or if no responses are requested."""
        config, has_reference = phase.config, learner.reference_key is not None
        count = unscored(config, has_reference=has_reference)
        if not count:
            return []
        encoder, run = self.policy.encoder, self.folder.id
        prompts = heldout.first_prompts(config, self.store, run, self.prompts, encoder, count)
        measures_kl = has_reference and samples_kl(config)
        if measures_kl:
            prompts = list(islice(cycle(prompts), count))
        if not prompts:
            return []
        rollout, activity = self._rollout(phase), self.activity
        return [heldout.Unscored(learner, rollout, prompts, activity, measures_kl=measures_kl)]
