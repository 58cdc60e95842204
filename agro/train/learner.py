"""A learner owns the weights and the optimizer. It takes batches and returns numbers, never weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from agro.config import LoRA, PolicyConfig, RunConfig, SamplerConfig, TrainConfig
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.models.pretrained import adamw_8bit
from agro.models.published import form_of, publish
from agro.models.reference import fingerprint, follow, is_shard, replaced
from agro.objectives import NotFinite
from agro.rollout.engines.draw import truncate
from agro.runs.folder import to_json_values
from agro.train.phases import derive
from agro.train.step import MicroBatch, Passes, Step, backward, streams_of
from agro.train.stored_tensors import StoredTensors, assign, exists
from agro.types import Batch, Sample

Which = Literal["policy", "reference"]
MOVING = ("ema", "periodic")  # references that change during a phase
OF_PHASE = ("phase", *MOVING)  # references that are, or start as, the checkpoint that the phase began with
LEARNER, AVERAGE = "learner.json", "average"  # a file and a part of each checkpoint


def nothing() -> None:
    """A check that never interrupts."""


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers (below 1e-38 in float32) in this thread, if the CPU can; also a decorator.

    Weights π/π_ref of improbable responses produce such numbers, which slow a CPU down several times. Rewards
    and records are computed outside this context, with all of their bits.
    """
    previous = float("1e-310") * 0.5 == 0  # torch can't report the setting
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(previous)


class Learner:
    """Owns the weights in this process. `version` counts optimizer steps.

    On several ranks, `agro.train.ranks` repeats these calls on each of them.
    """

    def __init__(self, policy: Policy, reference: Policy | None, say: Callable[[str], None]) -> None:
        self.policy, self.reference, self.say = policy, reference, say
        self.encoder = policy.encoder
        self.version = 0
        self.average: Average | None = None

    @property
    def reference_key(self) -> str | None:
        """Identifies the reference by all that its log-probs depend on; None without a reference."""
        return None if self.reference is None else fingerprint(self.reference)

    def enter(self, config: RunConfig, *, began: Path | None, resumed: Path | None) -> None:
        """Begin a phase, or continue it.

        `began`: the checkpoint that the phase began with, None at the start of the run. `resumed`: the
        checkpoint in the middle of the phase to continue from, whose weights were loaded.
        """
        self.config = config
        if resumed is None and config.train.start == "first":
            self._restart(config)
        self.micro = MicroBatch.of(config.train, self.say)
        self.policy.checkpoint_gradients(config.train.gradient_checkpointing)
        self.optimizer = Optimizer(self.policy, config.train)
        if began is not None and self.reference is not None and config.policy.reference in OF_PHASE:
            assign(began, "model", self.reference.weights())
        if resumed is None:
            averages = config.train.weights_average is not None
            self.average = Average(self.policy.weights(), self.policy.trained()) if averages else None
            return
        if (moving := self._moving_reference()) is not None:
            assign(resumed, "reference", moving)
        self.optimizer.load(resumed)
        counts = read_counts(resumed)
        self.micro.sequences, self.micro.tokens = counts["sequences"], counts["tokens"]

    @torch.no_grad()
    def _restart(self, config: RunConfig) -> None:
        """Restore the weights that the run began with, under a new version."""
        initial = Policy.load(config.policy, seed=derive(config.train.seed, "weights"))
        if self.policy.value_weights():
            initial.add_value()
        weights = self.policy.trained() | self.policy.value_weights()
        for name, weight in (initial.trained() | initial.value_weights()).items():
            weights[name].copy_(weight)
        if self.policy.masters is not None:
            self.policy.masters.round()
        self.version += 1
        self.say("the phase begins with the initial weights")

    def logp(self, batch: Batch, of: Which = "policy") -> Tensor:
        """[B,T] log-probs of the batch's tokens, float64, 0 outside the mask; no gradient."""
        policy = self.policy if of == "policy" else self.reference
        assert policy is not None
        return streams_of(policy, batch, ["logp"], self._passes())["logp"]

    def values(self, batch: Batch) -> Tensor:
        """[B,T] the learned value of the prefix before each token, 0 outside the mask; no gradient."""
        return streams_of(self.policy, batch, ["prefix_value"], self._passes())["prefix_value"]

    def logp_as_sampled(self, sample: Sample) -> NDArray[np.float64]:
        return logp_as_sampled(self.policy, sample)

    @denormals_as_zero()
    def gradient(
        self, batch: Batch, objective: str, options: Mapping[str, Any], check: Callable[[], None]
    ) -> Step:
        """Compute the objective's gradient and clip it; `check` may interrupt it. Raises `NotFinite`."""
        passes = self._passes(check)
        step = backward(self.policy, batch, objective, options, passes, self.reference)
        self._after_backward()
        return replace(step, norm=self.optimizer.clip())

    @denormals_as_zero()
    def move(self, lr: float, largest: float | None = None) -> None:
        """Make one optimizer step and increase the version by one. `largest`: see `Optimizer.move`."""
        self.optimizer.move(lr, largest)
        self.version += 1
        if self.average is not None:
            assert self.config.train.weights_average is not None
            self.average.update(self.config.train.weights_average)

    @denormals_as_zero()
    def along_gradient(self) -> Tensor:
        """[] see `Optimizer.along_gradient`; a move lowers it by its predicted gain."""
        return self.optimizer.along_gradient()

    @denormals_as_zero()
    def try_move(self, lr: float, batch: Batch) -> Tensor:
        """The log-probs that `logp` would return after `move`. All weights are restored bit for bit."""
        with self.optimizer.taken_back():
            self.optimizer.move(lr)
            return self.logp(batch)

    def follow(self, step: int) -> None:
        """Update a reference that follows the policy after `step` steps of the phase (from 1)."""
        if self.reference is not None:
            follow(self.reference, self.policy, self.config.policy, step)

    def refer(self, folder: Path) -> None:
        """Give the reference the weights that were published in `folder`."""
        if self.reference is not None:
            self.reference.load_weights(folder)

    def averaged(self) -> AbstractContextManager[None]:
        """Give the policy its averaged weights within the context, if train.weights_average is set.

        For evaluating and saving. Weights must not move meanwhile.
        """
        return nullcontext() if self.average is None else self.average.in_place()

    def show(self) -> None:
        """Let an engine in this process sample with the current weights; this one shares them."""

    def publish(self, folder: Path, policy: Policy | None = None) -> None:
        """Write the weights in the form that the engine takes; for servers, also a probe of them."""
        with complete_folder(folder) as temporary:
            probed = self.config.engine.uses_servers
            publish(policy or self.policy, temporary, form_of(self.config), probed=probed)

    def save_model(self, folder: Path, *, merge: bool) -> None:
        """Write model and tokenizer in transformers format; an adapter is merged, or written alone."""
        self.policy.save(folder, merge=merge)

    def save(self, folder: Path) -> None:
        """Write everything that `load` and `enter` need into a checkpoint's folder."""
        self._write(self.policy.trained(), folder, "model")
        self._write(self.optimizer.state(), folder, "optimizer")
        if self.policy.value_weights():
            self._write(self.policy.value_weights(), folder, "value")
        if (moving := self._moving_reference()) is not None:
            self._write(moving, folder, "reference")
        counts = {"sequences": self.micro.sequences, "tokens": self.micro.tokens}
        if self.average is not None:
            self._write(self.average.weights, folder, AVERAGE)
            counts["averaged"] = self.average.updates
        self._write_text(json.dumps(counts), folder / LEARNER)

    def load(self, folder: Path, version: int) -> None:
        """Load a checkpoint's weights, and their average if it has one."""
        assign(folder, "model", self.policy.trained())
        if self.policy.masters is not None:
            self.policy.masters.round()
        if self.policy.value_weights():
            assign(folder, "value", self.policy.value_weights())
        self.average = None
        if exists(folder, AVERAGE):
            self.average = Average(self.policy.weights(), self.policy.trained())
            assign(folder, AVERAGE, self.average.weights)
            self.average.updates = read_counts(folder)["averaged"]
        self.version = version

    def _passes(self, check: Callable[[], None] = nothing) -> Passes:
        return Passes(self.micro, check=check, offload="activations" in self.config.train.offload)

    def _moving_reference(self) -> dict[str, Tensor] | None:
        """The weights of a reference that changes during a phase."""
        is_moving = self.config.policy.reference in MOVING
        return self.reference.weights() if self.reference is not None and is_moving else None

    def _after_backward(self) -> None:
        """Complete the gradients."""

    def _write_text(self, text: str, file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    def _write(self, tensors: Mapping[str, Tensor], folder: Path, part: str) -> None:
        file = folder / f"{part}.safetensors"
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)


Local = Learner  # the name stresses that it isn't one of several ranks


@torch.no_grad()
def logp_as_sampled(policy: Policy, sample: Sample) -> NDArray[np.float64]:
    """[A] log-probs (nats) of an encoded sample's actions, at its sampling temperature and truncation.

    -inf for a token that the truncation excludes.
    """
    assert sample.tokens is not None
    assert sample.action is not None
    assert sample.sampling is not None
    names = ("temperature", "top_k", "top_p", "min_p")
    sampler = SamplerConfig(**{name: sample.sampling[name] for name in names})
    tokens = torch.tensor(sample.tokens, device=policy.device).long()
    logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampler.temperature
    logp = truncate(logits, sampler).log_softmax(1).gather(1, tokens[1:, None])[:, 0]
    actions: NDArray[np.float64] = logp.double().cpu().numpy()[sample.action[1:]]
    return actions


def read_counts(folder: Path) -> dict[str, Any]:
    """A checkpoint's pass limits, and its number of averaged optimizer steps."""
    counts: dict[str, Any] = json.loads((folder / LEARNER).read_text(encoding="utf-8"))
    return counts


def load_checkpoint(folder: Path, config: PolicyConfig) -> Policy:
    """Load a checkpoint's policy, with averaged weights if the run averages them. `config`: its [policy]."""
    run = RunConfig.load(folder.absolute().parents[1] / "config.json")
    policy = Policy.load(config, seed=derive(run.train.seed, "weights"))
    assign(folder, AVERAGE if exists(folder, AVERAGE) else "model", policy.weights())
    return policy


def save_model(learner: Learner, run: Path, lora: LoRA | None) -> None:
    """Write RUN/model, and RUN/adapter if an adapter was merged into it; each is complete or missing."""
    with complete_folder(run / "model") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
    if lora is not None and lora.merge:
        with complete_folder(run / "adapter") as folder:
            learner.save_model(folder, merge=False)


def keep_best(
    learner: Learner, run: Path, lora: LoRA | None, metric: str, measured: Mapping[str, Any]
) -> None:
    """Write RUN/best: the model, and in best.json the metric that chose it and its step's held-out metrics.

    The folder is complete or missing.
    """
    with complete_folder(run / "best") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
        heldout = {k: v for k, v in measured.items() if k.startswith("eval_") and v is not None}
        content = to_json_values({"step": measured["step"], "metric": metric, **heldout})
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (folder / "best.json").write_text(text, encoding="utf-8")


class Average:
    """avg ← a · avg + (1 − a) · θ after every optimizer step, starting at the first weights.

    After t steps a = min(decay, (1 + t) / (10 + t)), as in TensorFlow's `ExponentialMovingAverage` with
    `num_updates`: without this warm-up the first weights would keep the share decay^t. The average is at
    least float32, so that small shares of a difference aren't rounded away if the weights are bfloat16.
    For an adapter, its matrices are averaged, not their product.
    """

    def __init__(self, live: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """`live`: the model's parameters by name. `trained`: what is averaged, as of `Policy`."""
        self.live, self.trained = live, trained
        self.updates = 0
        self.weights: dict[str, Tensor] = {}
        for name, p in self.trained.items():
            self.weights[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        warm = (1 + self.updates) / (10 + self.updates)
        share = 1 - min(decay, warm)
        for name, average in self.weights.items():
            average.lerp_(self.trained[name].to(average.dtype), share)
        self.updates += 1

    def in_place(self) -> AbstractContextManager[None]:
        """Give the parameters the average's values within the context."""
        return replaced(self.live, self.weights)


class Optimizer:
    """Clips gradients and moves weights. The value learns at `train.value_lr`, on the policy's schedule."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.policy, self.config = policy, config
        trained, value = policy.trained(), policy.value_weights()
        self.parameters = trained | {f"value:{name}": weight for name, weight in value.items()}
        groups: list[dict[str, Any]] = [
            {"params": list(trained.values()), "is_value": False},
            {"params": list(value.values()), "is_value": True, "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        settings: dict[str, Any] = {"lr": 0.0, "betas": config.adam_betas, "eps": config.adam_eps}
        settings["weight_decay"] = config.weight_decay
        self.adam: torch.optim.Optimizer
        if config.optimizer == "adamw_8bit":
            self.adam = adamw_8bit(groups, policy.device, **settings)
        else:
            is_sharded = any(map(is_shard, trained.values()))  # then no fused kernel
            self.adam = torch.optim.AdamW(groups, **settings, fused=not is_sharded)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, keyed by parameter name and kind of moment."""
        names, tensors = list(self.parameters), {}
        # The state_dict of bitsandbytes nests its tensors.
        for i, entry in torch.optim.Optimizer.state_dict(self.adam)["state"].items():
            for kind, value in entry.items():
                tensors[f"{names[i]}/{kind}"] = torch.as_tensor(value)
        return tensors

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint."""
        numbers = {name: i for i, name in enumerate(self.parameters)}
        state: dict[int, dict[str, Any]] = {}
        stored = StoredTensors(folder, "optimizer")
        for key in stored.chunks:
            name, _, kind = key.rpartition("/")
            value: Any = stored.read(key, self.parameters[name])
            if kind == "step" and self.config.optimizer == "adamw_8bit":  # its kernels take a number
                value = int(value)
            state.setdefault(numbers[name], {})[kind] = value
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": state, "param_groups": groups})

    def clip(self) -> float:
        """Clip the gradients to norm `train.clip`; returns the policy's norm before that.

        Raises `NotFinite` for a norm that isn't finite.
        The value's gradient is clipped separately, so that it doesn't reduce the policy's.
        """
        norms = []
        for weights in (self.policy.trained(), self.policy.value_weights()):
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), self.config.clip)
            norms.append(float(norm.full_tensor() if is_shard(norm) else norm))
            if not math.isfinite(norms[-1]):
                bad = [n for n, p in weights.items() if p.grad is not None and not p.grad.isfinite().all()]
                named = f"{len(bad)} parameters, among them {', '.join(bad[:3])}"
                raise NotFinite(f"the gradient isn't finite in {named}")
        return norms[0]

    def move(self, lr: float, largest: float | None = None) -> None:
        """Move the policy's weights by one step at learning rate `lr`, and the value's in proportion.

        `largest`: the policy's largest rate in the phase, at which the value's rate is `train.value_lr`; `lr`
        by default.
        """
        for group in self.adam.param_groups:
            group["lr"] = lr * (self.config.value_lr / (largest or lr)) if group["is_value"] else lr
        offloads = "optimizer" in self.config.offload
        if offloads:
            self._move_state(None)
        self.adam.step()
        if offloads:
            self._move_state(torch.device("cpu"))
        if self.policy.masters is not None:
            self.policy.masters.round()

    @torch.no_grad()
    def along_gradient(self) -> Tensor:
        """[] ⟨g, θ⟩ of the policy's clipped gradient and its trained weights, summed over ranks.

        A move lowers it by −⟨g, Δθ⟩, whatever the optimizer did, so no copy of the weights is needed. That is
        a small difference of large numbers, so the tensors' sums are added in float64.
        """
        sums = [torch.zeros((), device=self.policy.device)]
        weights = [w for group in self.adam.param_groups if not group["is_value"] for w in group["params"]]
        for weight in weights:
            if weight.grad is not None:
                w, g = (x.to_local() if is_shard(x) else x for x in (weight, weight.grad))
                dtype = torch.promote_types(w.dtype, torch.float32)
                sums.append(torch.dot(w.flatten().to(dtype), g.flatten().to(dtype)))  # no tensor of products
        total = torch.stack(sums).sum(dtype=torch.float64)
        if any(map(is_shard, weights)):
            torch.distributed.all_reduce(total)
        return total

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Restore weights and moments at the end of the context. Meanwhile their copies are on the CPU."""
        grouped = [w.detach() for group in self.adam.param_groups for w in group["params"]]
        weights = [w.to_local() if is_shard(w) else w for w in grouped]
        saved = [w.to("cpu", copy=True) for w in weights]
        # The state_dict of bitsandbytes nests its tensors.
        state = copy.deepcopy(torch.optim.Optimizer.state_dict(self.adam))
        try:
            yield
        finally:
            for weight, previous in zip(weights, saved, strict=True):
                weight.copy_(previous)
            torch.optim.Optimizer.load_state_dict(self.adam, state)
            if self.policy.masters is not None:
                self.policy.masters.round()

    def _move_state(self, device: torch.device | None) -> None:
        """Move the optimizer's state to `device`; None: to the parameters' device."""
        for parameter, state in self.adam.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":  # the step count stays on the CPU
                    state[name] = value.to(device or parameter.device)
