"""Arrays that zinf keeps in files of NumPy."""

from pathlib import Path
from typing import Any

import numpy as np


def read_array(path: Path) -> Any:
    """What is in an `.npy` or `.npz` file. Pickles, which run code, are refused.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or pickled; the message says what to do.
    """
    try:
        return np.load(path)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is no array that zinf wrote: {error} Delete the file; it is "
            "computed anew."
        ) from error
