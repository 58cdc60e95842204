"""RUN/model to a repository of the Hugging Face hub. The token comes from `hf auth login` or HF_TOKEN, never from a configuration."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from agro.config import Train
from agro.errors import Refused


def check_push(train: Train) -> None:
    """Raise `Refused` before any compute where `train.push` can't work; asks nothing of the network."""
    if train.push is None:
        return
    try:
        validate_repo_id(train.push)
        well_formed = train.push.count("/") == 1
    except HFValidationError:
        well_formed = False
    if not well_formed:
        raise Refused(f"train.push: expected USER/NAME, got {train.push!r}")
    if huggingface_hub.is_offline_mode():
        raise Refused(f"train.push = {train.push}: HF_HUB_OFFLINE is set; unset it, or leave train.push out")
    if huggingface_hub.get_token() is None:
        raise Refused(
            f"train.push = {train.push}: no token of the hub; log in with hf auth login, or set HF_TOKEN"
        )


def push(folder: Path, train: Train) -> str | None:
    """Upload a folder, where `train.push` names a repository, which is made if it isn't there; returns its address.

    Raises `Refused` where the hub can't be reached or declines: the folder is as it was.
    """
    if train.push is None:
        return None
    api = huggingface_hub.HfApi()
    try:
        where = api.create_repo(train.push, private=train.push_private, exist_ok=True)
        api.upload_folder(
            repo_id=train.push, folder_path=folder, commit_message="Upload a model trained with agro"
        )
    except Exception as error:  # noqa: BLE001  # of the network or of any of huggingface_hub's libraries
        private = " --private" if train.push_private else ""
        raise Refused(
            f"train.push: {folder} wasn't uploaded to {train.push}: {str(error).strip():.500}\n"
            f"The run is done and kept. Try again with: hf upload {train.push} {folder} .{private}"
        ) from None
    return str(where)
