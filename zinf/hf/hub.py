"""Uploads an exported folder to the Hugging Face hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

# Weights of an earlier upload, which readers would take in place of the new ones: one
# file before several, and adapters before a whole model.
REPLACED = (
    *("model*.safetensors", "model*.safetensors.index.json"),
    *("adapter_model*.safetensors", "adapter_config.json"),
)
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN"


def check_login(name: str) -> None:
    """Refuse an upload that cannot begin, before a run and not after it.

    Args:
        name: of the repository: OWNER/NAME, or NAME for one of the user.

    Raises:
        ValueError: it is no such name.
        PermissionError: nobody is logged in.
        OSError: the hub cannot be reached, or refuses.
    """
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"run.hub_model_id is {name!r}, which is no name of a repository: {error}"
        ) from error
    if huggingface_hub.get_token() is None:
        raise PermissionError(
            f"The tuned model is to be uploaded to {name}, and nobody is logged in to "
            f"the Hugging Face hub. {LOGIN}."
        )
    try:
        huggingface_hub.HfApi().whoami()
    except (HfHubHTTPError, HTTPError) as error:
        raise OSError(
            f"The tuned model is to be uploaded to {name}, and the Hugging Face hub "
            f"does not take the login: {error}. {LOGIN}, or leave --push-to-hub out."
        ) from error


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload all files of a folder as one commit; returns its address.

    The repository is made if it is absent. Large files that are there already are not
    sent again. Other weights there, of an earlier upload, leave its newest state.

    Args:
        private: whether a new repository is.

    Raises:
        OSError: the hub refused, or the connection broke; the folder is complete.
    """
    api = huggingface_hub.HfApi()
    try:
        found = api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder,
            repo_id=found.repo_id,
            commit_message="Upload by zinf",
            delete_patterns=[*REPLACED],
        )
    except (HfHubHTTPError, HTTPError) as error:
        raise OSError(
            f"{folder} is complete and was not uploaded to {name}: {error}. Upload it "
            f"with `hf upload {name} {folder}`."
        ) from error
    return str(done.commit_url)
