"""`agro export RUN … --merged` and `--gguf`: the trained model in 16 bits, for other programs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from agro.cli.common import policy_config
from agro.cli.run_models import MeasuredModel
from agro.errors import Refused

CONVERTER = "convert_hf_to_gguf.py"  # of llama.cpp, which keeps it up to date with architectures


def write_merged(run: Path, folder: Path) -> None:
    """Write the model of a run, or a model's folder, in bfloat16, an adapter merged into it."""
    import torch

    from agro.io.files import complete_folder
    from agro.models.policy import Policy

    if folder.exists():
        raise Refused(f"{folder}: there is such a file or folder; give another one, or remove it")
    name = str(run)
    if (run / "metrics.jsonl").is_file():
        name = MeasuredModel.of(run, None, flag="another run").name
    policy = Policy.load(policy_config(name, None))
    policy.model.to(torch.bfloat16)
    with complete_folder(folder) as unfinished:
        policy.save(unfinished)


def write_gguf(run: Path, file: Path) -> None:
    """Convert the merged model with llama.cpp's converter. Without one the merged model stays beside `file`,
    and `Refused` says the command."""
    if file.exists():
        raise Refused(f"{file}: there is such a file; give another one, or remove it")
    merged = file.with_name(f"{file.stem}-merged")
    write_merged(run, merged)
    of_folder = Path(os.environ.get("LLAMA_CPP", "")) / CONVERTER
    converter = str(of_folder) if of_folder.is_file() else shutil.which(CONVERTER)
    program = converter or f"llama.cpp/{CONVERTER}"
    command = [program, str(merged), "--outfile", str(file), "--outtype", "bf16"]
    if converter is None:
        raise Refused(
            f"--gguf: {CONVERTER} of llama.cpp is neither on PATH nor in the folder LLAMA_CPP. The merged "
            f"model is in {merged}. What to do: get llama.cpp, then\n  python {shlex.join(command)}"
        )
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode or not file.exists():
        raise Refused(
            f"--gguf: {converter} failed: {done.stderr.strip()[-500:]}\nThe merged model is in {merged}"
        )
    shutil.rmtree(merged)
