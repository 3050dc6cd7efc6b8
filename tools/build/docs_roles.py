"""Extensions of griffe: roles in docstrings become links, and functions assigned in classes methods."""

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
                target = f"metal_prefill.{owner.name}.{name}"
            else:
                target = f"metal_prefill.{name}"
            text = html.escape(name.rpartition(".")[2] if short else name.removeprefix("metal_prefill."))
            return f'<autoref identifier="{target}" optional><code>{text}</code></autoref>'

        obj.docstring.value = ROLE.sub(link, obj.docstring.value)


class Methods(griffe.Extension):  # type: ignore[misc]
    """Replace attributes such as ``embed = _embedding.embed`` of a class by the function, as a method."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the attributes of the model."""
        model = pkg["model.Model"]
        for name, member in list(model.members.items()):
            if not member.is_attribute or not isinstance(member.value, griffe.ExprAttribute):
                continue
            target = pkg.modules_collection[member.value.canonical_path]
            if not target.is_function:
                continue
            method = griffe.Function(
                name,
                parameters=griffe.Parameters(*list(target.parameters)[1:]),
                returns=target.returns,
                docstring=target.docstring,
                lineno=member.lineno,
            )
            model.set_member(name, method)
