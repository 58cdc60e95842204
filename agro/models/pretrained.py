"""Loads models and tokenizers from folders or the hub, creates new ones with random weights, and inspects
their architecture.

transformers is imported only when a model is loaded: the import takes seconds, and much of agro needs none.

Flash attention and 8-bit optimizer states need a CUDA GPU and extra packages, 4-bit weights only packages.
None of them was run on a GPU yet; 4-bit weights were run on a CPU.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from agro import config as configuration
from agro.config import NewModel
from agro.errors import Refused
from agro.io.files import is_complete_folder, writing
from agro.io.processes import cores
from agro.models.adapters import base_of, is_adapter, merged_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


EXTRA = "pip install 'peft>=0.17' 'bitsandbytes>=0.46.1' 'accelerate>=1.1'"
LARGE = 30_000_000  # number of parameters from which one pass keeps several cores busy
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_PROBED = (7, 16)  # lengths that every probe has, in tokens
_LONGEST = 256  # a longer probe would take too long on a CPU
_LENGTHS = ("sliding_window", "window_size", "attention_chunk_size", "original_max_position_embeddings")
_WRITTEN = 16  # tokens per row that the model writes, including the given first one
ALLOWED = 2  # multiple of the measured rounding
_ROUNDINGS = 2
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")  # fully described by tokenizer.json


def loading_options(config: configuration.PolicyConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Raises `Refused` for what the machine or the settings don't allow."""
    options: dict[str, Any] = {}
    if config.attention != "auto":
        options["attn_implementation"] = config.attention
    if config.attention in _PACKAGES:
        package = _PACKAGES[config.attention]
        key = f"policy.attention = {config.attention}"
        _require(key, package, f"pip install {package.partition('_interface')[0]}", device)
        if config.dtype == "float32":
            raise Refused(f"{key}: expected policy.dtype = bfloat16 or mixed, got float32; set it")
    if config.quantize is None:
        return options
    key = f"policy.quantize = {config.quantize}"
    if config.lora is None or config.lora.merge or config.dtype != "bfloat16":
        raise Refused(
            f"{key}: expected [policy.lora] with merge = false, and policy.dtype = bfloat16: an adapter that "
            "is trained on quantized weights can't be merged into them. Set them, or remove quantize"
        )
    _require(key, "bitsandbytes", EXTRA)
    from transformers import BitsAndBytesConfig

    rules = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {**options, "quantization_config": rules, "device_map": {"": device}}


def adamw_8bit(groups: list[dict[str, Any]], device: torch.device, **settings: Any) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments; small tensors keep 32 bits."""
    _require("train.optimizer = adamw_8bit", "bitsandbytes", EXTRA, device)
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, **settings)
    return optimizer


def _require(key: str, package: str, install: str, device: torch.device | None = None) -> None:
    """Raise `Refused` if the package, or CUDA on `device` if that is given, is missing."""
    if device is not None and device.type != "cuda":
        raise Refused(f"{key}: expected a CUDA GPU, got device {device}; remove it, or use a GPU")
    if find_spec(package) is None:
        raise Refused(f"{key}: expected the package {package}, which isn't installed: {install}")


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The model's transformer blocks, first to last. Raises `Refused` if there is no list of them."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise Refused(
        f"{type(model).__name__}: expected a list of its {count} layers (torch.nn.ModuleList), found none; "
        "use another architecture, or sample with all layers (sampler.skip_layers = 0)"
    )


def positions_of(model: Any) -> int:
    """Number of tokens that the model's configuration allows; `sys.maxsize` without a limit."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return sys.maxsize


def context_of(model: Any) -> int:
    """Length in tokens of the longest sequence whose log-probs don't depend on other sequences.

    LongRoPE changes the angles of all positions of a pass once its longest sequence exceeds a length, so a
    token's log-prob would depend on later tokens and on the other rows. The context ends at that length. (The
    angles of dynamic NTK change only beyond `max_position_embeddings`, where every context ends.)
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    layers = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, Mapping)]
    limits = [int(r["original_max_position_embeddings"]) for r in layers if r.get("rope_type") == "longrope"]
    return min([positions_of(model), *limits])


def probed_lengths(model: Any, context: int) -> list[int]:
    """Lengths of a probe's rows: short ones, and some beyond the lengths that the configuration names."""
    settings = model.config.get_text_config().to_json_string(use_diff=False)
    named = re.findall(rf'"(?:{"|".join(_LENGTHS)})": (\d+)', settings)
    beyond = [length + 2 for length in map(int, named) if length < _LONGEST]
    return sorted({min(length, context) for length in (*_PROBED, *beyond) if length >= _PROBED[0]})


def without_randomness(model: torch.nn.Module) -> None:
    """Put a model in eval mode, except for modules with gradient checkpointing, which needs train mode.

    In those, every probability of dropout and of dropped layers becomes 0. Routers of experts choose as in
    eval mode: in train mode some add noise or sample the experts.
    """
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        if module.training:
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(module, name, 0.0)


def own_logp(model: Any, tokens: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Log-probs [T-1] of tokens [T] from the model's returned logits, and the largest logit."""
    tokens = tokens.to(model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = torch.log_softmax(scaled, -1).gather(1, tokens[1:, None])[:, 0]
    return logp, scaled.abs().max().item()


@torch.no_grad()
def written_rows(model: Any, lengths: Sequence[int], temperature: float) -> list[Tensor]:
    """Rows of tokens of these lengths, on the CPU, sampled from the model; long rows repeat the sample."""
    generator = torch.Generator().manual_seed(0)
    bos = model.config.get_text_config().bos_token_id
    is_valid = isinstance(bos, int) and 0 <= bos < model.get_input_embeddings().weight.shape[0]
    tokens = torch.full((len(lengths), 1), bos if is_valid else 0)
    for _ in range(min(_WRITTEN, max(lengths)) - 1):
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits[:, -1]
        probabilities = (logits.float().cpu() / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return [torch.tensor(list(islice(cycle(row), n))) for row, n in zip(tokens.tolist(), lengths)]


@torch.no_grad()
def moved_by_rounding(model: Any, logp: Callable[[], Tensor], expected: Tensor) -> float:
    """Mean difference between the log-probs `expected` and those with added rounding errors, nats per token.

    In 16 bits a correct pass of another shape is .001 nats per token off in one model and .3 in the next, and
    several nats on token sequences that no text has. So no constant separates rounding from a defect. This
    does: the model's own log-probs of the same tokens while each layer's output is rounded once more, up or
    down at random. Correct passes differ by .1 to .5 of that; a missing layer, a wrong mask or a stale output
    layer by much more.
    """
    generator = torch.Generator()

    def change(module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Change an output by half a unit in its last place."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        sign = torch.randint(0, 2, output.shape, generator=generator).to(output.device) - 0.5
        return (output.float() * (1 + torch.finfo(output.dtype).eps * sign)).to(output.dtype)

    leaves = [module for module in model.modules() if not next(module.children(), None)]
    hooks = [module.register_forward_hook(change) for module in leaves]
    moved = []
    try:
        for seed in range(_ROUNDINGS):
            generator.manual_seed(seed)
            moved.append((logp() - expected).abs().mean())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(moved).mean().item()


@contextmanager
def refusing_errors(name: str, doing: str) -> Iterator[None]:
    """Turn errors of the first use of model `name` into `Refused`."""
    try:
        yield
    except (Refused, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"{name}: {doing} fails: {type(error).__name__}: {error}; use another model") from error


def pretrained(
    name: str, config: configuration.PolicyConfig, adapters: tuple[Path, ...] = ()
) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder or the hub. Raises `Refused` if that fails.

    For an adapter's folder, the adapter is merged into the model. `adapters`: those that led to `name`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if is_adapter(name):
        path = Path(name).expanduser().resolve()
        if path in adapters:
            raise Refused(
                f"{name}: base_model_name_or_path: expected the model that the adapter belongs to, got a "
                "path back to the adapter itself; correct it in adapter_config.json"
            )
        model, tokenizer = pretrained(base_of(name), config, (*adapters, path))
        return merged_with(model, name), tokenizer
    local = is_complete_folder(name)
    source = str(Path(name).expanduser()) if local else name
    hint = "" if local else _ask_hub(name)
    common = {"trust_remote_code": config.trust_remote_code}
    options = loading_options(config, device_of(config.device))
    # A mixed policy has float32 weights; an adapter's weights always are float32.
    is_full = config.dtype == "float32" or (config.dtype == "mixed" and config.lora is None)
    dtype = torch.float32 if is_full else torch.bfloat16
    try:
        # AutoTokenizer ignores the splitting of tokenizer.json for some architectures, such as Qwen2
        plain = get_tokenizer_config(source).get("tokenizer_class") in _PLAIN_TOKENIZERS
        loader = PreTrainedTokenizerFast if plain else AutoTokenizer
        tokenizer = loader.from_pretrained(source, **common)
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
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
            f"the hub (pickled weights are not read: convert them with save_pretrained){hint}"
        ) from error
    if getattr(model, "is_quantized", False):  # else the first pass on a CPU would round and pack them again
        for module in model.modules():
            module.support_avx512bf16_for_cpu = False
    if names := _wrong_names(report, "missing_keys", "mismatched_keys"):
        raise Refused(
            f"{name}: {names}, which would be random; expected the complete model, as save_pretrained "
            "writes it"
        )
    return model, tokenizer


def saved_weights(folder: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of a folder's model, by their names in `model`, on the CPU.

    transformers reads them, since names in the file may differ: it stores each expert of a mixture
    separately. Raises `Refused` unless the file has exactly the tensors of `model`, in their shapes.
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
    if names := _wrong_names(report, "missing_keys", "unexpected_keys", "mismatched_keys"):
        raise Refused(f"{folder}: expected the weights of this {type(model).__name__}, got {names}")
    return dict(saved.state_dict())


def _wrong_names(report: dict[str, Any], *kinds: str) -> str:
    """Count and name the keys of the first kind that transformers reports; "" if it reports none."""
    for kind in kinds:
        keys = sorted(key if isinstance(key, str) else key[0] for key in report[kind])
        if keys:
            return f"{len(keys)} {kind.replace('_', ' ')} in its weights ({', '.join(keys[:3])}, …)"
    return ""


def _ask_hub(name: str) -> str:
    """Announce a request to the hub for a model that isn't cached: without a network it takes a minute.

    Returns the way out for an offline hub, for the message if the model isn't found.
    """
    from huggingface_hub import is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if is_offline_mode():
        return (
            f"\nHF_HUB_OFFLINE is set, and {name} is not complete in the hub's cache: unset it, or download "
            f"the model on a machine with a network (hf download {name}) and give the folder"
        )
    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # not a name on the hub; refused later
        return ""
    if not is_cached:
        note = f"{name}: there is no such folder here; asking the Hugging Face hub"
        print(note, file=sys.stderr, flush=True)
    return ""


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would appear at every checkpoint."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def set_threads(threads: int | Literal["auto"], model: torch.nn.Module) -> None:
    """Set the process's number of CPU threads according to `policy.threads`."""
    if threads == "auto":
        threads = cores() if parameters(model) >= LARGE else 1
    if threads:
        torch.set_num_threads(threads)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        is_supported = device.type in ("cpu", "cuda")
    except RuntimeError:
        is_supported = False
    if name.partition(":")[0] == "mps":
        raise Refused(
            "policy.device: mps: Apple's GPU has no float64, which sampling and summing gradients need; use "
            "device = 'cpu' or 'auto'"
        )
    if not is_supported:
        raise Refused(f"policy.device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not (
        torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    ):
        raise Refused(
            f"policy.device: {name}: there is no such CUDA device here; use device = 'cpu' or 'auto'"
        )
    return device


PAD, BOS, EOS, UNK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


def new_model(folder: str | Path, spec: NewModel, seed: int) -> None:
    """Write model and tokenizer into `folder`; the same bytes for the same `spec` and `seed`.

    The vocabulary is <pad>, <bos>, <eos>, <unk>, then the characters. <bos> precedes a text. Decoding is
    exact, even for text that spells a special token.
    """
    if spec.hidden % spec.heads or spec.hidden // spec.heads % 2:
        raise Refused(
            "policy.new: expected hidden to be heads times an even number, "
            f"got hidden = {spec.hidden}, heads = {spec.heads}"
        )
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(spec)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=-(-8 * spec.hidden // 3 // 8) * 8,  # Llama's 8/3, rounded up to a multiple of 8
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.context,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    with writing(Path(folder)), without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _tokenizer(spec: NewModel) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    as_bytes = spec.alphabet == "bytes"
    characters = sorted(pre_tokenizers.ByteLevel.alphabet()) if as_bytes else list(spec.alphabet)
    if len(set(characters)) < len(characters) or not characters:
        repeated = sorted({c for c in characters if characters.count(c) > 1})
        raise Refused(
            f"policy.new.alphabet: expected distinct characters, or 'bytes'; repeated: {''.join(repeated)!r}"
        )
    vocabulary = {piece: i for i, piece in enumerate(itertools.chain(SPECIALS, characters))}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token=UNK)  # without merges: one token per character
    tokenizer = Tokenizer(model)
    if as_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel() if as_bytes else decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=spec.context,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
