"""Extension of griffe: references such as ``:class:`Model``` in docstrings become links of the site."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`(~?)([\w.]+)`")


class Roles(griffe.Extension):  # type: ignore[misc]
    """Replace roles by references, which are plain code if the name has no page."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is None:
            return
        owner = obj if obj.is_class else obj.parent

        def link(match: re.Match[str]) -> str:
            short, name = match[1], match[2]
            if name.startswith("metal_prefill"):
                target = name
            elif owner is not None and owner.is_class and name[0].islower():
                # Methods of Model are defined in classes from which it inherits.
                bases = {"GenerationMethods", "TaskMethods"}
                target = f"metal_prefill.{'Model' if owner.name in bases else owner.name}.{name}"
            else:
                target = f"metal_prefill.{name}"
            text = html.escape(name.rpartition(".")[2] if short else name.removeprefix("metal_prefill."))
            return f'<autoref identifier="{target}" optional><code>{text}</code></autoref>'

        obj.docstring.value = ROLE.sub(link, obj.docstring.value)
