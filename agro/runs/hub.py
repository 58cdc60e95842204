"""Upload of RUN/model to the Hugging Face hub.

The token comes from `hf auth login` or HF_TOKEN, never from a configuration.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from agro.config import Train
from agro.errors import Refused


def check_push(train: Train) -> None:
    """Raise `Refused` before any compute where `train.push` can't work. Does not use the network."""
    if train.push is None:
        return
    try:
        validate_repo_id(train.push)
    except HFValidationError as error:
        raise Refused(f"train.push: expected USER/NAME, got {train.push!r}: {error}") from None
    if train.push.count("/") != 1:
        raise Refused(f"train.push: expected USER/NAME, got {train.push!r}")
    where = f"train.push = {train.push}"
    if huggingface_hub.is_offline_mode():
        raise Refused(f"{where}: HF_HUB_OFFLINE is set; unset it, or remove train.push")
    if huggingface_hub.get_token() is None:
        raise Refused(f"{where}: no token of the hub; log in with hf auth login, or set HF_TOKEN")


def push(folder: Path, train: Train) -> str | None:
    """Upload a folder to the repository `train.push`, if there is one, and return its address.

    The repository is created if needed. Raises `Refused` where the hub can't be reached or declines.
    """
    if train.push is None:
        return None
    api = huggingface_hub.HfApi()
    message = "Upload a model trained with agro"
    try:
        where = api.create_repo(train.push, private=train.push_private, exist_ok=True)
        api.upload_folder(repo_id=train.push, folder_path=folder, commit_message=message)
    except Exception as error:  # noqa: BLE001  # of the network or of any of huggingface_hub's libraries
        private = " --private" if train.push_private else ""
        raise Refused(
            f"train.push: {folder} was not uploaded to {train.push}: {str(error).strip():.500}\n"
            f"The run is done and kept. Try again with: hf upload {train.push} {folder} .{private}"
        ) from None
    return str(where)
