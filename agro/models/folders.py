"""What can be said of a model's name before torch is imported."""

from __future__ import annotations

from pathlib import Path

from agro.errors import Refused

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def is_complete_folder(name: str) -> bool:
    """Whether it is the folder of a model, or a name of the hub. Raises `Refused` for any other folder."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if _is_path(name):
            checkpoints = ", ".join(sorted(path.name for path in folder.parent.glob("step-*")))
            there = f"; there are {checkpoints}" if checkpoints else ""  # the run keeps the last ones
            raise Refused(f"{name}: expected the folder of a model, but there is no such folder{there}")
        return False
    if not (folder / "config.json").is_file():
        raise Refused(f"{name}: expected a model in transformers format, but the folder has no config.json")
    if not any((folder / f).is_file() for f in _TOKENIZER_FILES):
        raise Refused(
            f"{name}: the folder has no tokenizer (expected {_TOKENIZER_FILES[0]}); "
            "save the model's tokenizer there: tokenizer.save_pretrained(folder)"
        )
    return True


def _is_path(name: str) -> bool:
    """Whether a name can't be one of the hub, which has at most one slash."""
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
