"""Arrays of a file or of a caller, without trust in either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line


def array_of(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Values as numpy has them; one object for rows of unlike lengths, which are no array."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.asarray(None)


def open_array(path: Path) -> npt.NDArray[Any]:
    """Maps an ``.npy`` array, so that a header that claims more than there is takes no memory.

    Raises ``OSError`` for what is no file, and ``ValueError`` that says why for what is no array.
    """
    open_file(path).close()
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy raises anything for a damaged header, or one of 10¹² entries
        raise ValueError(f"is not an intact .npy array ({one_line(error)})") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("holds several arrays")
    return array
