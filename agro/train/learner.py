"""A learner owns the weights and the optimizer. It takes batches and returns numbers, never weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from agro.config import LoRA, RunConfig, SamplerConfig
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.models.published import form_of, publish
from agro.models.reference import fingerprint, follow
from agro.rollout.engines.draw import truncate
from agro.runs.folder import to_json_values
from agro.train.micro import MicroBatch
from agro.train.optimizer import Average, Optimizer, denormals_as_zero
from agro.train.phases import derive
from agro.train.step import Passes, Step, backward, streams_of
from agro.train.stored_tensors import StoredTensors, assign, exists
from agro.types import Batch, Sample

Which = Literal["policy", "reference"]
MOVING = ("ema", "periodic")  # references that change during a phase
LEARNER, AVERAGE = "learner.json", "average"  # a file, and a part of a checkpoint


class Learner:
    """The weights in this process. `version` counts optimizer steps.

    On several ranks `agro.train.ranks` repeats these calls on each.
    """

    def __init__(self, policy: Policy, reference: Policy | None, say: Callable[[str], None]) -> None:
        self.policy, self.reference, self.say = policy, reference, say
        self.encoder = policy.encoder
        self.version = 0
        self.average: Average | None = None

    @property
    def reference_key(self) -> str | None:
        """Identifies the reference by all that its log-probs depend on; None where there is no reference."""
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
        if began is not None and self.reference is not None and config.policy.reference in ("phase", *MOVING):
            assign(began, "model", self.reference.weights())
        if resumed is None:
            averages = config.train.weights_average is not None
            self.average = Average(self.policy.weights(), self.policy.trained()) if averages else None
            return
        moving = self._moving_reference()
        if moving is not None:
            assign(resumed, "reference", moving)
        self._load_optimizer(resumed)
        counts = read_counts(resumed)
        self.micro.sequences, self.micro.tokens = counts["sequences"], counts["tokens"]

    @torch.no_grad()
    def _restart(self, config: RunConfig) -> None:
        """Take the weights that the run began with, under a version of their own."""
        first = Policy.load(config.policy, seed=derive(config.train.seed, "weights"))
        if self.policy.value_weights():
            first.add_value()
        for name, weight in first.trained().items():
            self.policy.trained()[name].copy_(weight)
        for name, weight in first.value_weights().items():
            self.policy.value_weights()[name].copy_(weight)
        if self.policy.masters is not None:
            self.policy.masters.round()
        self.version += 1
        self.say("the phase begins with the first weights")

    def logp(self, batch: Batch, of: Which = "policy") -> Tensor:
        """[B,T] log-probs of the batch's tokens, float64, 0 outside the mask; no gradient."""
        policy = self.policy if of == "policy" else self.reference
        assert policy is not None
        return streams_of(policy, batch, ["logp"], self._passes())["logp"]

    def values(self, batch: Batch) -> Tensor:
        """[B,T] the learned value of what comes before each token, 0 outside the mask; no gradient."""
        return streams_of(self.policy, batch, ["prefix_value"], self._passes())["prefix_value"]

    def logp_as_sampled(self, sample: Sample) -> NDArray[np.float64]:
        return logp_as_sampled(self.policy, sample)

    @denormals_as_zero()
    def gradient(
        self, batch: Batch, objective: str, options: Mapping[str, Any], check: Callable[[], None]
    ) -> Step:
        """Compute the objective's gradient and clip it; `check` may stop it. Raises `NotFinite`."""
        passes = self._passes(check)
        step = backward(self.policy, batch, objective, options, passes, self.reference)
        self._after_backward()
        return replace(step, norm=self.optimizer.clip())

    @denormals_as_zero()
    def move(self, lr: float, largest: float | None = None) -> None:
        """One optimizer step along the gradient; the version grows by one. `largest`: see `Optimizer`."""
        self.optimizer.move(lr, largest)
        self.version += 1
        if self.average is not None:
            assert self.config.train.weights_average is not None
            self.average.update(self.config.train.weights_average)

    @denormals_as_zero()
    def along_gradient(self) -> Tensor:
        """[] see `Optimizer.along_gradient`, which a move lowers by what it promised."""
        return self.optimizer.along_gradient()

    @denormals_as_zero()
    def try_move(self, lr: float, batch: Batch) -> Tensor:
        """The log-probs that `logp` would return after `move`, which is taken back, bit for bit."""
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
        """While it lasts, the policy has the average of its weights, where train.weights_average is set.

        For what is measured and saved. Weights must not move meanwhile.
        """
        return nullcontext() if self.average is None else self.average.in_place()

    def show(self) -> None:
        """Let an engine in this process sample with the current weights; this one shares them."""

    def publish(self, folder: Path, policy: Policy | None = None) -> None:
        """Write the weights in the form that the engine takes; for servers a probe of them too."""
        with complete_folder(folder) as temporary:
            probed = self.config.engine.uses_servers
            publish(policy or self.policy, temporary, form_of(self.config), probed=probed)

    def save_model(self, folder: Path, *, merge: bool) -> None:
        """Write model and tokenizer in transformers format; an adapter is merged, or written by itself."""
        self.policy.save(folder, merge=merge)

    def save(self, folder: Path) -> None:
        """Write everything that `load` and `enter` need into a checkpoint's folder."""
        self._write(self.policy.trained(), folder, "model")
        self._write(self._optimizer_state(), folder, "optimizer")
        if self.policy.value_weights():
            self._write(self.policy.value_weights(), folder, "value")
        moving = self._moving_reference()
        if moving is not None:
            self._write(moving, folder, "reference")
        counts = {"sequences": self.micro.sequences, "tokens": self.micro.tokens}
        if self.average is not None:
            self._write(self.average.weights, folder, AVERAGE)
            counts["averaged"] = self.average.updates
        self._write_text(json.dumps(counts), folder / LEARNER)

    def load(self, folder: Path, version: int) -> None:
        """Take the weights of a checkpoint, and their average where it has one."""
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

    def _passes(self, check: Callable[[], None] = lambda: None) -> Passes:
        return Passes(self.micro, check=check, offload="activations" in self.config.train.offload)

    def _moving_reference(self) -> dict[str, Tensor] | None:
        if self.reference is None or self.config.policy.reference not in MOVING:
            return None
        return self.reference.weights()

    def _names(self) -> list[str]:
        """The names of all parameters of the optimizer, in its order."""
        return [*self.policy.trained(), *(f"value:{name}" for name in self.policy.value_weights())]

    def _optimizer_state(self) -> dict[str, Tensor]:
        names = self._names()
        tensors = {}
        # Not the state_dict of bitsandbytes, which nests its tensors.
        for i, entry in torch.optim.Optimizer.state_dict(self.optimizer.adam)["state"].items():
            for kind, value in entry.items():
                tensors[f"{names[i]}/{kind}"] = torch.as_tensor(value)
        return tensors

    def _load_optimizer(self, folder: Path) -> None:
        parameters = [*self.policy.trained().values(), *self.policy.value_weights().values()]
        numbers = {name: i for i, name in enumerate(self._names())}
        state: dict[int, dict[str, Any]] = {}
        stored = StoredTensors(folder, "optimizer")
        for key in stored.chunks:
            name, _, kind = key.rpartition("/")
            state.setdefault(numbers[name], {})[kind] = stored.read(key, parameters[numbers[name]])
        if self.config.train.optimizer == "adamw_8bit":  # whose kernels take a number
            for entry in state.values():
                entry["step"] = int(entry["step"])
        groups = self.optimizer.adam.state_dict()["param_groups"]
        self.optimizer.adam.load_state_dict({"state": state, "param_groups": groups})

    def _after_backward(self) -> None:
        """Complete the gradients."""

    def _write_text(self, text: str, file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    def _write(self, tensors: Mapping[str, Tensor], folder: Path, part: str) -> None:
        """Write a part of a checkpoint."""
        file = folder / f"{part}.safetensors"
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)


Local = Learner  # where it matters that it isn't one of several ranks


@torch.no_grad()
def logp_as_sampled(policy: Policy, sample: Sample) -> NDArray[np.float64]:
    """[A] nats of the policy's choices in an encoded sample, at its temperature and after its truncation.

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
    found: NDArray[np.float64] = logp.double().cpu().numpy()[sample.action[1:]]
    return found


def read_counts(folder: Path) -> dict[str, Any]:
    """The limits of a pass, and how many optimizer steps were averaged, in a checkpoint."""
    counts: dict[str, Any] = json.loads((folder / LEARNER).read_text(encoding="utf-8"))
    return counts


def save_model(learner: Learner, run: Path, lora: LoRA | None) -> None:
    """Write RUN/model, and RUN/adapter where an adapter was merged into it; each is complete or missing."""
    with complete_folder(run / "model") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
    if lora is not None and lora.merge:
        with complete_folder(run / "adapter") as folder:
            learner.save_model(folder, merge=False)


def keep_best(
    learner: Learner, run: Path, lora: LoRA | None, metric: str, measured: Mapping[str, Any]
) -> None:
    """Write RUN/best: the model, and in best.json the metric that chose it and all held-out ones of its step.

    The folder is complete or missing.
    """
    with complete_folder(run / "best") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
        heldout = {k: v for k, v in measured.items() if k.startswith("eval_") and v is not None}
        content = to_json_values({"step": measured["step"], "metric": metric, **heldout})
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (folder / "best.json").write_text(text, encoding="utf-8")
