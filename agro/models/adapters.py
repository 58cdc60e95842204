"""Low-rank adapters, through peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from agro import config as configuration
from agro.errors import Refused

TIED = (
    "policy.lora: expected an adapter that can be merged, got one on the embedding of a model whose output "
    "layer is the same matrix (tie_word_embeddings), so merging would change both. What to do: other "
    "policy.lora.targets, or policy.lora.merge = false and sampling in the trainer's process"
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(name: str) -> bool:
    """Whether `name` is the folder of an adapter rather than a model."""
    return (Path(name).expanduser() / CONFIG).is_file()


def base_of(folder: str) -> str:
    """Folder or hub name of the model to which an adapter belongs."""
    path = Path(folder).expanduser() / CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: can't be read: {error}") from None
    if not base:
        raise Refused(
            f"{path}: base_model_name_or_path: expected the model that the adapter belongs to, got {base!r}"
        )
    return str(base)


def adapted(model: Any, name: str, config: configuration.LoRA) -> Any:
    """A peft model around `model`, whose linear layers are replaced in place. Only the adapter is trained.

    `name`: folder or hub name of the base model, for the adapter's configuration.
    """
    peft = _peft()
    folder = Path(name).expanduser()
    base = str(folder.resolve()) if folder.is_dir() else name
    if config.start is not None:
        adapter = _with_adapter(model, config.start, trainable=True)
    else:
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules="all-linear" if config.targets == ("all-linear",) else list(config.targets),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        try:
            adapter = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise Refused(f"policy.lora.targets: {', '.join(config.targets)}: {error}") from None
    if config.merge and _is_tied(adapter):  # `merged` would refuse it when the run saves its model
        raise Refused(TIED)
    return adapter


def merged_with(model: Any, folder: str) -> Any:
    """`model` with the adapter of `folder` merged into its weights."""
    return merged(_with_adapter(model, folder, trainable=False))


def merged(adapter: Any) -> Any:
    """A model with a peft model's merged weights. The peft model stays unchanged.

    Sums are float64, so that a merged weight is the exact sum, rounded once to the model's type.
    """
    if getattr(adapter.get_base_model(), "is_quantized", False):
        raise Refused(
            "expected a model that the adapter can be merged into, got quantized weights (policy.quantize). "
            "What to do: policy.lora.merge = false, and sampling in the trainer's process"
        )
    if _is_tied(adapter):
        raise Refused(TIED)
    complete = copy.deepcopy(adapter)
    for layer in complete.modules():
        if _is_adapted(layer):
            base = layer.get_base_layer()
            dtype = base.weight.dtype
            layer.double()
            layer.merge()
            base.to(dtype)
    return complete.unload()


def _is_adapted(layer: Any) -> bool:
    return isinstance(layer, _peft().tuners.tuners_utils.BaseTunerLayer)


def _is_tied(adapter: Any) -> bool:
    """Whether the adapter changes an embedding that is also the output layer."""
    model = adapter.get_base_model()
    is_shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return is_shared and _is_adapted(model.get_input_embeddings())


def _with_adapter(model: Any, folder: str, *, trainable: bool) -> Any:
    path = Path(folder).expanduser()
    for file in (CONFIG, WEIGHTS):  # peft would load pickled weights too
        if not (path / file).is_file():
            raise Refused(
                f"{folder}: expected the folder of an adapter with {CONFIG} and {WEIGHTS}; it has no {file}"
            )
    try:
        return _peft().PeftModel.from_pretrained(model, str(path), is_trainable=trainable)
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise Refused(f"{folder}: the adapter doesn't fit the model: {str(error).strip():.300}") from None


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise Refused("an adapter needs peft, which isn't installed: pip install 'peft>=0.17'") from None
    return peft
