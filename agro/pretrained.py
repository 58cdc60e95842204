"""Models and tokenizers from folders and from the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import safetensors
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging

from agro import config as configuration
from agro.accelerated import loading_options
from agro.adapters import base_of, is_adapter, merged_with
from agro.errors import Refused

LARGE = 30_000_000  # parameters from which one pass keeps several cores busy
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")  # fully described by tokenizer.json


def pretrained(name: str, config: configuration.Policy, adapters: tuple[Path, ...] = ()) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder or the hub. Raises `Refused` where that fails.

    For the folder of an adapter, the model has the adapter merged. `adapters`: those that belong to it.
    """
    if is_adapter(name):
        path = Path(name).expanduser().resolve()
        if path in adapters:
            raise Refused(
                f"{name}: base_model_name_or_path: expected the model that the adapter belongs to, but it "
                "leads back to the adapter itself; correct it in adapter_config.json"
            )
        model, tokenizer = pretrained(base_of(name), config, (*adapters, path))
        return merged_with(model, name), tokenizer
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise Refused(f"{name}: expected a model in transformers format, but the folder has no config.json")
    if local and not any((folder / f).is_file() for f in _TOKENIZER_FILES):
        raise Refused(
            f"{name}: the folder has no tokenizer (expected {_TOKENIZER_FILES[0]}); "
            "save the model's tokenizer there: tokenizer.save_pretrained(folder)"
        )
    if not local and (
        folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    ):
        others = ", ".join(sorted(path.name for path in Path(name).parent.glob("step-*")))
        there = f"; there are {others}" if others else ""  # checkpoints, of which the run keeps the last ones
        raise Refused(f"{name}: expected the folder of a model, but there is no such folder{there}")
    where = str(folder) if local else name
    common = {"trust_remote_code": config.trust_remote_code}
    options = loading_options(config, device_of(config.device))
    try:
        # AutoTokenizer ignores the splitting of tokenizer.json for some architectures, such as Qwen2
        plain = get_tokenizer_config(where).get("tokenizer_class") in _PLAIN_TOKENIZERS
        kind = PreTrainedTokenizerFast if plain else AutoTokenizer
        tokenizer = kind.from_pretrained(where, **common)
        model, report = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=_dtype(config),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **options,
            **common,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, safetensors.SafetensorError) as error:
        raise Refused(
            f"{name}: can't be loaded: {str(error).strip() or type(error).__name__}\n"
            "expected a causal language model with its tokenizer and model.safetensors, in a folder or on "
            "the hub (pickled weights are not read: convert them with save_pretrained)"
            + _offline(name, local)
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if names := _names(report, what):
            raise Refused(
                f"{name}: {names}: they would be random; expected the complete model, as "
                "save_pretrained writes it"
            )
    return model, tokenizer


def _dtype(config: configuration.Policy) -> torch.dtype:
    """Of the weights as they are loaded. A mixed policy keeps them in float32; an adapter's always are."""
    if config.dtype == "float32" or (config.dtype == "mixed" and config.lora is None):
        return torch.float32
    return torch.bfloat16


def saved_weights(folder: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of a folder's model by their names in `model`, on the CPU.

    They are read by transformers, since names in the file may differ: it stores each expert of a mixture
    separately. Raises `Refused` unless the file has each tensor of `model`, in its shape, and no others.
    """
    if not (folder / "config.json").is_file():
        raise Refused(f"{folder}: expected a model in transformers format, but the folder has no config.json")
    try:
        with without_bars():
            saved, report = type(model).from_pretrained(
                folder,
                config=model.config,
                dtype=model.dtype,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise Refused(f"{folder}: expected weights in model.safetensors: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := _names(report, what):
            raise Refused(f"{folder}: expected the weights of this {type(model).__name__}, got {names}")
    return dict(saved.state_dict())


def _names(report: dict[str, Any], what: str) -> str:
    """How many of such keys transformers reports, and the first of them; nothing where there are none."""
    keys = sorted(key if isinstance(key, str) else key[0] for key in report[what])
    return f"{len(keys)} {what.replace('_', ' ')} in its weights ({', '.join(keys[:3])}, …)" if keys else ""


def _offline(name: str, local: bool) -> str:
    if local or not huggingface_hub.is_offline_mode():
        return ""
    return (
        f"\nHF_HUB_OFFLINE is set, and {name} is not complete in the hub's cache: unset it, or download the "
        f"model where there is a network (hf download {name}) and give the folder"
    )


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bars: a policy is saved at every checkpoint."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def set_threads(threads: int | Literal["auto"], model: torch.nn.Module) -> None:
    """Set the CPU threads of the process as `policy.threads` says."""
    if threads == "auto":
        threads = cores() if parameters(model) >= LARGE else 1
    if threads:
        torch.set_num_threads(threads)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if name.partition(":")[0] == "mps":
        raise Refused(
            "policy.device: mps: Apple's GPU has no float64, in which tokens are drawn and gradients are "
            "summed; use device = 'cpu' or 'auto'"
        )
    if not known:
        raise Refused(f"policy.device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not (
        torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    ):
        raise Refused(
            f"policy.device: {name}: there is no such CUDA device here; use device = 'cpu' or 'auto'"
        )
    return device
