"""Checks on clang's syntax tree of a source as C++ for OpenCL.

In C++ for OpenCL, a pointer without an address space points to the generic one, which Metal does not have.
Such pointers are rejected here, as are recursion and lambdas.
"""

from typing import Any

Node = dict[str, Any]
Place = tuple[str, int]
SPACES = ("__global", "__local", "__constant")


class Checker:
    """Walks a syntax tree in clang's JSON, in which locations omit values equal to the previous ones."""

    def __init__(self, shim: str) -> None:
        self.shim = shim  # folder whose declarations are not checked
        self.errors: list[tuple[str, int, str]] = []
        self.functions: dict[str, tuple[str, Place]] = {}
        self.calls: dict[str, set[str]] = {}
        self._file, self._line = "", 0

    def check(self, tree: Node) -> list[tuple[str, int, str]]:
        """Return (file, line, message) of every violation."""
        self._walk(tree, None, ("", 0))
        self._recursion()
        return sorted(set(self.errors))

    def _place(self, location: Node | None) -> Place | None:
        """Resolve a location as written in the Metal source; remembers values that later locations omit."""
        if not location:
            return None
        if "spellingLoc" in location or "expansionLoc" in location:
            self._place(location.get("spellingLoc"))
            return self._place(location.get("expansionLoc"))
        self._file = location.get("presumedFile") or location.get("file") or self._file
        self._line = location.get("presumedLine") or location.get("line") or self._line
        return (self._file, self._line) if "offset" in location else None

    def _walk(self, node: Node, function: str | None, outer: Place) -> None:
        own = self._place(node.get("loc"))
        begin = self._place((node.get("range") or {}).get("begin"))
        self._place((node.get("range") or {}).get("end"))
        place = own or begin or outer
        kind = node.get("kind", "")
        generated = node.get("isImplicit") and kind.startswith("CXX") and kind != "CXXRecordDecl"
        if not generated:
            if place[0] and not place[0].startswith(self.shim) and place[0] != "<built-in>":
                self._node(node, kind, place)
            if kind in ("FunctionDecl", "CXXMethodDecl"):
                function = node.get("id")
                self.functions[str(function)] = (str(node.get("name")), place)
            if function is not None and kind in ("DeclRefExpr", "MemberExpr"):
                target = node.get("referencedDecl", {}).get("id") or node.get("referencedMemberDecl")
                if target:
                    self.calls.setdefault(function, set()).add(target)
        for child in node.get("inner", ()):
            if isinstance(child, dict):
                self._walk(child if not generated else _locations_only(child), function, place)

    def _node(self, node: Node, kind: str, place: Place) -> None:
        spelled = node.get("type", {}).get("qualType", "")
        name = node.get("name", "")
        if (
            kind in ("ParmVarDecl", "VarDecl", "FieldDecl")
            and "__generic" in spelled
            and not node.get("isImplicit")
        ):
            self._error(place, f"pointer or reference '{name}' has no address space")
        elif kind == "FunctionDecl" and "__generic" in spelled.split("(")[0]:
            self._error(place, f"'{name}' returns a pointer or reference without address space")
        elif kind.endswith("CastExpr") and kind != "ImplicitCastExpr" and "__generic" in spelled:
            self._error(place, "a cast to a pointer or reference without address space")
        elif kind == "LambdaExpr":
            self._error(place, "Metal has no lambda expressions before version 3.2")
        elif kind == "CallExpr":
            self._call(node, place)
        elif kind == "MemberExpr":
            self._member(node, place)

    def _call(self, node: Node, place: Place) -> None:
        """Reject numbers passed as vectors to Metal's functions, which have many overloads."""
        callee, *arguments = node.get("inner") or [{}]
        function = (callee.get("inner") or [{}])[0].get("referencedDecl", {})
        _, (file, _) = self.functions.get(function.get("id"), ("", (self.shim, 0)))
        if file.startswith(self.shim) and any(a.get("castKind") == "VectorSplat" for a in arguments):
            name = function.get("name")
            self._error(place, f"'{name}' is given a number and a vector; make a vector of the number")

    def _member(self, node: Node, place: Place) -> None:
        """Reject a call of a member function for thread objects on an object in another address space."""
        inner = (node.get("inner") or [{}])[0]
        if inner.get("castKind") != "AddressSpaceConversion":
            return
        source = inner.get("inner", [{}])[0].get("type", {}).get("qualType", "")
        if any(space in source for space in SPACES):
            self._error(
                place, f"member function '{node.get('name')}' is for thread objects, called on ({source})"
            )

    def _recursion(self) -> None:
        for function, (name, place) in self.functions.items():
            if place[0].startswith(self.shim):
                continue
            reached, pending = set(), list(self.calls.get(function, ()))
            while pending:
                callee = pending.pop()
                if callee not in reached:
                    reached.add(callee)
                    pending += self.calls.get(callee, ())
            if function in reached:
                self._error(place, f"'{name}' calls itself; Metal has no recursion")

    def _error(self, place: Place, message: str) -> None:
        self.errors.append((place[0], place[1], message))


def _locations_only(node: Node) -> Node:
    """Return a node that is not checked, but whose locations are read, since later ones depend on them."""
    return {**node, "isImplicit": True, "kind": "CXXSkipped"}
