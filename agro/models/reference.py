"""The reference π_ref: a frozen copy of a policy, or another model; fixed, or following the policy."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from agro import config as configuration
from agro.errors import Refused
from agro.models.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class SharedReference(Policy):
    """A copy of a policy with an adapter that shares the frozen weights and has its own adapter weights.

    The copied weights are in place only while hidden states are computed. (The model without an adapter would
    be the reference only if the adapter starts at zero.)
    """

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__)
        self.value = None
        self.masters = None
        self._live = policy.weights()
        self._own: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._live.items()}

    def weights(self) -> dict[str, Tensor]:
        return self._own

    def hidden(self, tokens: Tensor, lengths: Tensor, *, packs: bool = True) -> Tensor:
        with torch.no_grad(), replaced(self._live, self._own):
            return super().hidden(tokens, lengths, packs=packs)


def is_shard(weight: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks share the weight. Importing `DTensor` takes a second; unless imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(weight, module.DTensor)


@contextmanager
def replaced(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the parameters `live` the `values` of the same names within the context."""
    previous: dict[str, Tensor] = {}
    try:
        for name, p in live.items():
            previous[name] = _exchange(p, values[name])
        yield
    finally:
        for name, value in previous.items():
            _exchange(live[name], value)


def _exchange(p: Tensor, value: Tensor) -> Tensor:
    """Give a parameter another value; return the previous one.

    A shard is overwritten in place: FSDP gathers weights from its own memory.
    """
    if not is_shard(p):
        previous = p.data
        p.data = value.to(p.dtype)
        return previous
    previous = p.detach().clone()
    p.detach().copy_(value)
    return previous


def duplicate(policy: Policy) -> Policy:
    """A copy with its own model, without value head and float32 masters."""
    other = copy.copy(policy)
    other.value = None
    other.masters = None
    if policy.adapter is None:
        other.model = copy.deepcopy(policy.model)
    else:
        other.adapter = copy.deepcopy(policy.adapter)
        other.model = other.adapter.get_base_model()
    return other


def frozen(policy: Policy) -> Policy:
    """A copy that isn't trained."""
    if policy.adapter is not None:
        return SharedReference(policy)
    reference = duplicate(policy)
    reference.model.requires_grad_(False)
    return reference


def load_reference(config: configuration.PolicyConfig, policy: Policy) -> Policy:
    """The reference of a run that starts from `policy`.

    Raises `Refused` if `policy.reference_model` has another tokenizer or vocabulary.
    """
    if config.reference != "model":
        return frozen(policy)
    dtype = "bfloat16" if config.dtype == "mixed" else config.dtype
    changes = {"model": config.reference_model, "new": None, "lora": None, "dtype": dtype}
    other = Policy.load(config.model_copy(update=changes))
    for part, ours, theirs in (
        ("tokenizer", policy.fingerprint, other.fingerprint),
        ("vocabulary", policy.vocab_size, other.vocab_size),
    ):
        if ours != theirs:
            raise Refused(
                f"policy.reference_model: {config.reference_model}: expected the {part} of policy.model "
                f"({ours}), got {theirs}: the log-probs of other tokens can't be compared; use a reference "
                "with the same tokens"
            )
    other.model.requires_grad_(False)
    return other


def fingerprint(policy: Policy) -> str:
    """A hash of all that a policy's log-probs depend on: tokenizer, shape, temperature, every weight.

    One core takes a second and a half per GiB of weights, less than reading them from a disk; up to four
    threads run. For a reference on a server, the server's name of the model replaces the weights.
    """
    if policy.served is not None:
        return f"{policy.fingerprint}/{policy.served}"
    replaced = policy.weights()

    def digest(named: tuple[str, Tensor]) -> bytes:
        name, p = named
        weights = replaced.get(name, p).detach().cpu().contiguous().view(torch.uint8).numpy().data
        return hashlib.sha256(name.encode() + hashlib.sha256(weights).digest()).digest()

    total = hashlib.sha256(f"{policy.model.config.to_json_string()}{policy.temperature}".encode())
    with ThreadPoolExecutor(4) as pool:
        for part in pool.map(digest, policy.model.named_parameters()):
            total.update(part)
    return f"{policy.fingerprint}/{total.hexdigest()[:16]}"


@torch.no_grad()
def follow(reference: Policy, policy: Policy, config: configuration.PolicyConfig, step: int) -> None:
    """Update a reference that follows the policy after `step` steps of the phase (from 1)."""
    if config.reference == "ema":
        assert config.reference_decay is not None
        share = 1 - config.reference_decay
    elif config.reference == "periodic":
        assert config.reference_every is not None
        if step % config.reference_every:
            return
        share = 1.0
    else:
        return
    live = policy.trained()
    for name, weight in reference.weights().items():
        weight.lerp_(live[name].to(weight.dtype), share)
