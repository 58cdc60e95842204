"""TRL's GRPOTrainer with the objective `agro`: ½ Var of r − β log π/π_ref over each prompt's completions.

Written for TRL 1.16.0. Sampling, rewards, the reference and the optimizer stay TRL's. The gradient of a
completion depends on the current log-probs of its complete group, so micro-batches hold complete groups.
Unlike in TRL, completions aren't shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from agro.api.trl_arguments import check_arguments, check_model
from agro.errors import Refused
from agro.objectives import evaluate
from agro.types import Batch


class AGROTrainer(GRPOTrainer):
    """`trl.GRPOTrainer`, and its arguments, with AGRO's loss (arXiv 2503.19612, eq. 4, divided by β).

    `args.beta` is β, in units of reward per nat of log π/π_ref of a completion; 0 is RLOO.
    `args.scale_rewards` must be "none", and `args.per_device_train_batch_size` a multiple of
    `args.num_generations`. `options`: other options of the objective `agro`, such as {"average": "token"}.
    Log-probs are at `args.temperature`. Of TRL's metrics `entropy` and `clip_ratio` are missing, and `kl` is
    the mean of log π/π_ref per completion, in nats; `consistency` is the loss.

    Raises `Refused` for an argument that changes GRPO's loss and has no counterpart in AGRO's, for
    micro-batches that split a group, and for a reward that is known in only part of a group.
    """

    _tag_names = ("trl", "agro")
    _name = "AGRO"
    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.options = dict(options or {})
        check_arguments(args, self.options)
        super().__init__(model, reward_funcs, args, *positional, **named)
        check_model(self)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Like TRL's, but in the order of the prompts, so that groups stay together."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        count = self.args.steps_per_generation
        if self._buffered_inputs is None or self._step % (count * self.num_iterations) == 0:
            generated = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(generated, count)
        inputs: dict[str, Any] = self._buffered_inputs[self._step % count]
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        start = self.accelerator.process_index * len(inputs)
        return {**output, "reward": self._reward_N[start : start + len(inputs)]}

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        """Return all processes' rewards [N,F]. Store their weighted sum, NaN if no function returned one."""
        reward_NF: Tensor = super()._calculate_rewards(*arguments)
        n = self._group_size()
        unknown_GnF = reward_NF.isnan().view(-1, n, reward_NF.shape[1])
        partly_F = (unknown_GnF.any(1) & ~unknown_GnF.all(1)).any(0)
        if partly_F.any():
            raise Refused(
                f"reward function {self.reward_func_names[int(partly_F.int().argmax())]}: expected a number "
                f"for all {n} completions of a prompt or for none, got None for some: sums of different "
                "rewards can't be compared"
            )
        sum_N = (reward_NF.double() * self.reward_weights.to(reward_NF.device)).nansum(1)
        self._reward_N = sum_N.masked_fill(reward_NF.isnan().all(1), torch.nan)
        return reward_NF

    def _group_size(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _logp(self, model: Any, part: Mapping[str, Tensor]) -> Tensor:
        """Return the [B,T] log-probs of the completions' tokens."""
        tokens_BS = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        mask_BS = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        length = part["completion_ids"].shape[1]
        logp_BT: Tensor = self._get_per_token_logps_and_entropies(model, tokens_BS, mask_BS, length)[0]
        return logp_BT

    def _gradient(self, part: Mapping[str, Tensor], logp_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss over complete groups, and its [B,T] gradient with respect to the log-probs."""
        n, B = self._group_size(), len(logp_BT)
        if B % n:
            raise Refused(f"per_device_eval_batch_size: expected a multiple of {n} generations, got {B} rows")
        batch = Batch.of(
            mask=_after_prompt(_mask(part)),
            reward=part["reward"],
            group=[row // n for row in range(B)],
            ref_logp=_after_prompt(part["ref_per_token_logps"]) if self.beta else None,
        )
        with torch.enable_grad():  # for the objective alone, in evaluation too
            result = evaluate("agro", _after_prompt(logp_BT.double()), batch, beta=self.beta, **self.options)
        return logp_BT.new_tensor(result.loss), result.grad[:, 1:]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss, with the gradient Σ g ∂logp/∂θ, g = d loss / d logp over complete groups."""
        logp_BT = self._logp(model, inputs)
        value, gradient_BT = self._gradient(inputs, logp_BT.detach())
        surrogate = (gradient_BT * logp_BT.double()).sum()
        loss: Tensor = value + surrogate - surrogate.detach()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["consistency"].append(self.accelerator.gather(value).mean().item())
        if self.beta:
            ratio_B = ((logp_BT.detach() - inputs["ref_per_token_logps"]) * _mask(inputs)).sum(1)
            metrics["kl"].append(self.accelerator.gather(ratio_B).mean().item())
        return loss / self.current_gradient_accumulation_steps if self.model.training else loss


def _mask(part: Mapping[str, Tensor]) -> Tensor:
    """Return the [B,T] mask of the completions' tokens to learn from, without tool output."""
    return part["completion_mask"] * part.get("tool_mask", part["completion_mask"])


def _after_prompt(x_BT: Tensor) -> Tensor:
    """Prepend a column of zeros, [B,T+1], for the prompt: a batch's first token has no log-prob."""
    return torch.nn.functional.pad(x_BT, (1, 0))
