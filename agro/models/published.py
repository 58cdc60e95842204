"""Publishes weights for engines, with log-probs that identify them.

A server may answer every request and still have other weights than those it was sent. So the folder of
published weights also has a `Probe`: fixed token sequences, and the learner's log-probs of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import own_logp

Form = Literal["model", "explicit_head", "adapter"]
"""model: the complete model, with any adapter merged; explicit_head: the same, with a tied output layer under
its own name; adapter: the adapter alone"""

PROBE = "probe.json"
LENGTHS = (5, 40, 120, 200)  # lengths of a probe's sequences, in tokens
ROUNDING = {True: 0.05, False: 1e-3}  # nats per token, by whether weights have half precision


@dataclass(frozen=True)
class Probe:
    """Token sequences, and log-probs of each token but the first: nats at temperature 1."""

    ids: list[list[int]]
    logp: list[list[float]]
    allowed: float  # mean difference due to rounding, nats per token

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Policy) -> Probe:
        """Probe the policy's own model in eval mode."""
        random = np.random.default_rng(0)
        # A server that scores a sequence also samples a token, which must fit into its context.
        lengths = [min(length, policy.context - 1) for length in LENGTHS]
        ids = [random.integers(0, len(policy.tokenizer), length).tolist() for length in lengths]
        rows = [torch.tensor(row, device=policy.device) for row in ids]
        logp = [own_logp(policy.model, row, temperature=1.0)[0].tolist() for row in rows]
        return cls(ids, logp, ROUNDING[torch.finfo(policy.dtype).bits <= 16])

    @classmethod
    def read(cls, folder: Path) -> Probe:
        """Read a folder's probe. Raises `Refused` if no learner published the folder."""
        file = folder / PROBE
        if not file.exists():
            raise Refused(f"{folder}: expected weights that a learner published, with {PROBE}")
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        (folder / PROBE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def form_of(config: RunConfig) -> Form:
    """The form in which the engine of a configuration takes new weights."""
    if not config.engine.uses_servers:
        return "model"
    way = config.engine.push or ("reload" if config.policy.lora is None else "adapter")
    forms: dict[str, Form] = {"reload": "explicit_head", "transfer": "model", "adapter": "adapter"}
    return forms[way]


def publish(policy: Policy, folder: Path, form: Form, *, probed: bool = True) -> None:
    """Write the weights of `policy` into a folder, in transformers' or peft's format; a probe for servers."""
    policy.save(folder, merge=form != "adapter")
    if form == "explicit_head":
        write_tied_weights(folder, policy)
    if probed:
        Probe.of(policy).write(folder)


def load_published(config: PolicyConfig, folder: Path) -> Policy:
    """The policy of a run as a separate model, with published weights. Raises `Refused` like `Policy.load`.

    Its tokenizer has the run's chat template, whose file may be on another host.
    """
    chat = config.chat.model_copy(update={"template": None})
    changes = {"model": str(folder), "new": None, "lora": None, "chat": chat}
    return Policy.load(config.model_copy(update=changes))


def write_tied_weights(folder: Path, policy: Policy) -> None:
    """Write tied weights, such as an output layer, under their own names into a saved model.

    Servers that load new weights by name don't update a tied output layer: vLLM's `reload_weights` doesn't
    on a CPU.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return
    state = policy.model.state_dict()
    tied = {name: state[name].detach().cpu().clone() for name in policy.model._tied_weights_keys}
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.exists():
        save_file({**load_file(file), **tied}, file, metadata={"format": "pt"})
    else:  # sharded: add a file
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] |= dict.fromkeys(tied, "model-tied.safetensors")
        save_file(tied, folder / "model-tied.safetensors", metadata={"format": "pt"})
        index.write_text(json.dumps(content) + "\n", encoding="utf-8")
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
