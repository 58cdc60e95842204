"""What is minimized, with which optimizer, and what is measured, shown and kept on the way."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from agro.config.override import LENGTH
from agro.config.section import Count, Positive, Section, Share, Temperature, field

STEPS = 100  # where neither steps nor epochs are given


class ObjectiveConfig(BaseModel):
    """What is minimized: the name of an objective, and its options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    name: str = "agro"
    """one of `agro.objectives.names()`, or one of your own as file.py:NAME or module:NAME"""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Steps, their size, memory, and the optimizer."""

    steps: Count | None = None
    """batches drawn and trained on; 100 where neither this nor epochs is given"""
    epochs: Positive | None = None
    """passes over the stored groups that the phase may draw, instead of steps, with data.replay = 1. When the
    run begins they become ceil(epochs × stored groups / groups) steps, which it keeps where the store
    grows"""
    start: Literal["previous", "first"] = "previous"
    """weights that a phase begins with: those of the phase before, or those that the run began with, such as
    for a phase that trains the first model on what later ones found (BFS-Prover-V2, arXiv 2509.06493)"""
    seed: int = field(0, ge=0)
    """of weights, sampling and draws"""
    groups: Count = 16
    """prompts a step"""
    updates: Count = 1
    """optimizer steps a batch"""
    micro_batch: Count | None = None
    """sequences in one forward pass at most. Doesn't change the result"""
    micro_tokens: Count | None = None
    """tokens in one forward pass at most, padding included; a longer sequence goes alone. 2,048 where neither
    this nor micro_batch is given. Doesn't change the result"""
    gradient_checkpointing: bool = False
    """recompute each layer's activations in the backward pass instead of keeping them"""
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """what is kept in the CPU's memory while the GPU doesn't use it"""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: both moments in 8 bits (bitsandbytes), 2 bytes a weight instead of 8. Needs
    bitsandbytes and a CUDA GPU"""
    lr: Positive | Literal["auto"] = 1e-5
    """largest learning rate, which the warm-up ends at. auto: found at the phase's first step, as the rate at
    which it changes the policy by its bound, that of step_kl or, where it is not given, of step_kl = 0.005;
    the step is tried a few times and taken back, at a forward pass each"""
    value_lr: Positive = 1e-2
    """largest learning rate of the value head, where the objective learns a value; warm-up and schedule as of
    lr"""
    warmup: int = field(0, ge=0)
    """optimizer steps of linear warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the learning rate, over the phase, to 0"""
    adam_betas: tuple[Share, Share] = (0.9, 0.999)
    """decay per update of the gradient's first and second moment"""
    adam_eps: Positive = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = field(0.0, ge=0)
    """share of a weight, times the learning rate, that an update subtracts"""
    weights_average: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay per optimizer step of an exponential moving average of the policy's weights, which starts at the
    first weights of the phase; held-out data are measured with the average, and RUN/best and RUN/model have
    it. Training and sampling don't use it. No average where it is not given"""
    clip: float = field(1.0, gt=0)
    """largest norm of the gradient of a step; a larger one is scaled down to it"""
    gain_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """least share that an optimizer step is to keep of the gain that its gradient promises (Armijo's
    condition): 0.5 is the best single step's. Where steps keep less, the rate of the next ones is lowered.
    Costs a forward pass of each batch; no rule where it is not given"""
    step_kl: Positive | None = None
    """how far an optimizer step may change the policy, nats a token: half the mean squared change of the
    log-probs of the step's tokens. Where steps change it more, the rate of the next ones is lowered. A phase
    of fewer than 100 optimizer steps has a larger bound, step_kl √(100 / steps). Costs the same forward pass;
    no bound where it is not given"""
    max_length: int | None = field(None, ge=2)
    """tokens a sequence at most; the model's context where it is not given. Longer sequences are dropped and
    counted"""
    max_skipped: Count = 5
    """steps in a row with a non-finite gradient before the run stops"""
    rank_seconds: float = field(60.0, resume=True, shared=True, ge=1, le=86400)
    """on several ranks (torchrun), a rank that isn't heard of for so many seconds ends the run: its process
    was killed or stopped, or its host is out of reach. A rank that works for longer is heard of meanwhile"""
    checkpoint_every: Count = 50
    """steps between checkpoints; a killed run loses fewer than these"""
    keep: Count = field(2, resume=True)
    """checkpoints kept, besides the one that the phase began with: where one is damaged, the one before it is
    used"""
    show_every: int = field(0, resume=True, ge=0)
    """steps between sample responses on the terminal; 0 shows none"""
    push: str | None = field(None, resume=True, shared=True)
    """USER/NAME on the Hugging Face hub: RUN/model is uploaded there after the run; the token is that of hf
    auth login, or HF_TOKEN"""
    push_private: bool = field(True, resume=True, shared=True)
    """a repository that push makes is private"""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        """Either steps or epochs."""
        if not isinstance(values, dict):
            return values
        lengths = [key for key in LENGTH if values.get(key) is not None]
        if len(lengths) > 1:
            raise PydanticCustomError("length", "expected one of train.steps and train.epochs")
        return values if lengths else {**values, "steps": STEPS}


class GuardConfig(Section):
    """What counts as an explosion, and what happens then: see `agro.train.monitors.guard`."""

    loss: Annotated[float, Field(gt=1)] | None = field(None, resume=True)
    """largest |loss|, in multiples of its median over the last `window` steps; no rule where it is not
    given"""
    kl: Positive | None = field(None, resume=True)
    """largest kl_ref, nats a response; no rule where it is not given"""
    logp_diff: float = field(0.1, resume=True, ge=0)
    """largest logp_diff_fresh, nats a token: how far the log-probs of sampler and trainer are apart at equal
    weights. A larger one ends the run before the weights move, whatever `action` is; 0: no rule"""
    window: Annotated[int, Field(ge=5)] = 20
    """steps over which `loss` takes the median"""
    action: Literal["skip", "stop", "rollback"] = field("stop", resume=True)
    """skip: drop the update; stop: end the run; rollback: go back to the last checkpoint at half the learning
    rate"""
    rollbacks: Count = field(3, resume=True)
    """how often a run may go back; then it stops"""
    stage_seconds: float = field(600.0, resume=True, shared=True, ge=0)
    """a stage without progress for so many seconds is named on the terminal; 0: never"""


class EvaluateConfig(Section):
    """Measurements on held-out data: before the first step, at the ends of phases, every `every` steps."""

    every: int = field(0, ge=0)
    """steps between evaluations; 0: at the ends of phases only"""
    metric: Literal["eval_reward", "eval_auc", "eval_consistency", "eval_log_ratio_best"] | None = field(
        None, shared=True
    )
    """held-out metric that keep_best, patience and target follow; eval_consistency is better where it is
    lower, the others where they are higher. Where it is not given, eval_reward with data.eval_prompts, else
    eval_auc with data.hold_out or data.eval_store"""
    keep_best: bool = field(False, resume=True)
    """keep the model with the best value of the metric in RUN/best (the best of many is flattered by
    chance)"""
    patience: int = field(0, resume=True, ge=0)
    """evaluations in a row without a better value of the metric after which the run ends; 0: it doesn't"""
    target: float | None = field(None, resume=True)
    """the run ends where the metric reaches this"""
    target_kl: Positive | None = field(None, resume=True)
    """the run ends where eval_kl_ref reaches this, nats per response"""
    n: Count = 1
    """responses a prompt"""
    pass_at: float | None = field(None, resume=True)
    """reward from which a response passes, in the accuracy and pass@k of `agro eval`; where it is not given,
    the reward's own maximum"""
    temperature: Temperature = 1.0
    """of held-out responses; eval_kl_ref is known only where it equals policy.temperature"""
    kl: bool = True
    """measure the KL to the reference too; keeps a copy of the reference in memory"""
    kl_samples: int = field(32, ge=0)
    """responses, one a prompt, that measure eval_kl_ref in a phase on stored data without data.eval_prompts,
    where the run has a reference: to held-out prompts of the store, or else to prompts that it draws. They
    need no reward. 0: none"""
    side_by_side: int = field(8, resume=True, ge=0, le=64)
    """prompts, chosen by a hash of their ids, to which the log's best response, one of the start and one of
    the trained model are kept in side_by_side.json. They are of data.eval_prompts; in a run on stored data
    without these they are held-out prompts of the store, or else some that are trained on, sampled at the
    ends of phases. 0: none"""
    beta: float | None = field(None, gt=0)
    """reward per nat of the response's log-ratio: β at which ½ Var(R) and regret are measured, whatever the
    objective, and of nothing else; the objective's own where it is not given. An objective without the
    reference's log-probs then costs a copy of the reference and a forward pass over fresh responses per
    step"""


class TrackConfig(Section):
    """Copies of the metrics for other, installed programs; `metrics.jsonl` is always written."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = field((), resume=True)
    """which programs"""
    project: str = field("agro", resume=True, min_length=1)
    """of W&B and trackio"""
    name: str | None = field(None, resume=True)
    """of the run there; the run folder's where it is not given"""
