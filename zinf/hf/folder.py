"""Finds the files of a model: in a folder, or on the Hugging Face hub."""

from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from xxhash import xxh3_128

from zinf.core.interchange.safetensors_files import INDEX_SUFFIX, SUFFIX, read_index
from zinf.data.digest import sampled_digest
from zinf.hf.module import CONFIG

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = "model.safetensors"
# The same weights again, as the maker's own programs read them.
OTHER_FORMS = ("original/*", "consolidated*")
ADAPTER_CONFIG = "adapter_config.json"
GGUF = ".gguf"
NO_GGUF = (
    "is quantized for llama.cpp (GGUF), and zinf does not read that form. Use the "
    "model's own checkpoint in safetensors."
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_folder(path_or_id: str | Path, *, weights: bool = False) -> Path:
    """The folder of a model; one of the hub is downloaded to the hub's cache.

    Args:
        path_or_id: a folder, a config.json in one, or the name of a model on the hub,
            such as "Qwen/Qwen3-8B".
        weights: whether the weights are needed too; else only the small files are.

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such model or
            cannot be reached.
        PermissionError: the model is gated.
        OSError: the hub refused the request, or a download was cut off.
        NotImplementedError: the weights are a GGUF file.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        quantized = sorted(path.glob(f"*{GGUF}"))
        if quantized and not any(path.glob(f"*{SUFFIX}")):
            raise NotImplementedError(f"{quantized[0]} {NO_GGUF}")
        return path
    if path.is_file():
        if path.name == CONFIG:
            return path.parent
        if path.suffix == GGUF:
            raise NotImplementedError(f"{path} {NO_GGUF}")
        raise ValueError(
            f"{path} is a file. Name the folder of the model, or the {CONFIG} in it."
        )
    name = str(path_or_id)
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if is_path or path.parent.is_dir() and name.startswith(str(path.parent) + "/"):
        raise FileNotFoundError(
            f"There is no folder {name} (relative paths start at {Path.cwd()}). Name "
            "one with a config.json, or a model of the hub, such as Qwen/Qwen3-8B."
        )
    get = partial(huggingface_hub.snapshot_download, name, ignore_patterns=OTHER_FORMS)
    try:
        found = Path(get(allow_patterns=SMALL_FILES))
        if weights:
            get(allow_patterns=_names_of_weights(found))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and the Hugging Face hub cannot be reached to "
            "get it, nor is it in the hub's cache. Download the model elsewhere, and "
            "name its folder."
        ) from error
    except GatedRepoError as error:
        raise PermissionError(
            f"The Hugging Face hub gives {name} only to those who accepted its terms "
            f"({_code(error)}). Accept them on the page of the model, and log in with "
            "`hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"The Hugging Face hub has no model {name} ({_code(error)}), or it is "
            "private. Check the spelling; for a private one log in with `hf auth "
            "login`."
        ) from error
    except HfHubHTTPError as error:
        raise OSError(
            f"The Hugging Face hub refused {name} ({_code(error)}): {error}. Try again "
            "later, or download the model elsewhere and name its folder."
        ) from error
    except HTTPError as error:
        raise OSError(
            f"The download of {error.request.url.path} for {name} was cut off: "
            f"{error}. Run the command again: complete files are kept."
        ) from error
    except HFValidationError as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and no name of a model on the hub: {error}"
        ) from error
    return found


def _names_of_weights(folder: Path) -> list[str]:
    """The files that the index of a model names; without one, all of the form."""
    index = folder / WEIGHTS.replace(SUFFIX, INDEX_SUFFIX)
    return sorted({*read_index(index).values()}) if index.is_file() else [f"*{SUFFIX}"]


def _code(error: HfHubHTTPError) -> str:
    return str(error.response.status_code) if error.response is not None else "no code"


def weights_path(folder: Path) -> Path:
    """What `SafetensorsFiles` opens: the file of a model, or its folder of shards.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
        NotImplementedError: its weights are pickles.
    """
    if (folder / WEIGHTS.replace(SUFFIX, INDEX_SUFFIX)).is_file():
        return folder
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    if any(folder.glob(f"*{SUFFIX}")):
        return folder
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise NotImplementedError(
            f"The weights in {folder} are pickles ({pickles[0]}), which run code when "
            "they are read; zinf reads safetensors only. Load the model in "
            "transformers and save it: save_pretrained writes safetensors."
        )
    raise FileNotFoundError(
        f"{folder} has a {CONFIG} and no weights: no file *{SUFFIX} is there. Get "
        "them, or only plan: zinf plan --model."
    )


def weights_digest(folder: Path) -> str:
    """A digest of the weights in a folder, and of the configs that say what they are.

    Of each file it is the `sampled_digest`.
    """
    total = xxh3_128()
    for pattern in (CONFIG, ADAPTER_CONFIG, f"*{SUFFIX}"):
        for path in sorted(folder.glob(pattern)):
            total.update(f"{path.name}:{sampled_digest(path)}\n".encode())
    return total.hexdigest()
