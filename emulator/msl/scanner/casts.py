"""Rewrites vector constructors, and rejects casts to vectors.

Vectors are clang's ``ext_vector_type``, which provides swizzles, operators and fast code. But C++ has no
``float4(v.xy, 1, 2)`` for it, and ``(int4)v`` reinterprets bits whereas Metal converts values. For a type T
that is or may be a vector:

=========================  ==============================
``T(a, b)``                ``::msl::construct<T>(a, b)``
``T name(a, b);``          ``T name = ::msl::construct<T>(a, b);``
``(T)x``                   refused: shaders write ``T(x)``
``static_cast<T>(x)``      refused
=========================  ==============================
"""

from typing import NoReturn

from .tokens import TokenList

ELEMENTS = ("float", "half", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
VECTORS = frozenset(f"{element}{width}" for element in ELEMENTS for width in (2, 3, 4))
EXPRESSION_WORDS = ("return", "case", "else", "do")  # names that an expression may follow
NOT_BEFORE_TYPE = (".", "->", "~", "class", "struct", "enum", "operator", "typename", "using", "namespace")
OPERANDS = ("(", "-", "!", "~", "*", "&", "::")  # punctuation with which an operand may begin


class CastRewriter:
    """Tracks the names that are or may be vectors, and rewrites their constructors."""

    def __init__(self, tokens: TokenList) -> None:
        self.tokens = tokens
        self.parameters = self._type_parameters()
        self.types = VECTORS | self.parameters | self._aliases()
        self.angles = self._closing_angles()

    def _type_parameters(self) -> frozenset[str]:
        """Return names of template type parameters."""
        names = set()
        for index, token in enumerate(self.tokens):
            if token.text in ("typename", "class") and self.tokens.at(index - 1) in ("<", ","):
                position = index + 1 + (self.tokens.at(index + 1) == "...")
                if self.tokens.kind(position) == "name" and self.tokens.at(position + 1) in (",", ">", "="):
                    names.add(self.tokens.at(position))
        return frozenset(names)

    def _aliases(self) -> frozenset[str]:
        """Return the names that using and typedef define; each may be a vector."""
        names = set()
        for index, token in enumerate(self.tokens):
            if token.text == "using" and self.tokens.at(index + 2) == "=":
                names.add(self.tokens.at(index + 1))
            elif token.text == "typedef":
                end = next(i for i in range(index, len(self.tokens)) if self.tokens[i].text == ";")
                names.add(self.tokens.at(end - 1))
        return frozenset(names)

    def _closing_angles(self) -> frozenset[int]:
        """Return the indices of ``>`` that close template arguments."""
        closers = set()
        for index in range(len(self.tokens)):
            if self.tokens.kind(index - 1) == "name" and (closing := self.tokens.closing_angle(index)):
                closers.add(closing)
        return frozenset(closers)

    def _type(self, index: int) -> tuple[int, bool] | None:
        """Parse a type name at index; return the end and whether it is or may be a vector."""
        tokens, position, named = self.tokens, index, False
        while tokens.at(position) in ("const", "typename"):
            named = named or tokens.at(position) == "typename"
            position += 1
        if tokens.at(position) == "::":
            position += 1
        while True:
            if tokens.kind(position) != "name":
                return None
            last = tokens.at(position)
            position += 1
            template = False
            if (closing := tokens.closing_angle(position)) is not None:
                position, template = closing + 1, True
            if tokens.at(position) == "::" and tokens.kind(position + 1) == "name":
                position += 1
                continue
            return position, named or (last == "vec" if template else last in self.types)

    def _is_expression_context(self, index: int) -> bool:
        """Whether an expression may begin at index, judged by the token before it."""
        before = self.tokens.at(index - 1)
        if before in NOT_BEFORE_TYPE or (before == ">" and index - 1 in self.angles):
            return False
        return self.tokens.kind(index - 1) != "name" or before in EXPRESSION_WORDS

    def rewrite(self, bodies: list[tuple[int, int]]) -> None:
        """Rewrite all tokens; bodies are the braces of functions, where declarations may construct."""
        tokens, index = self.tokens, 0
        while index < len(tokens):
            if tokens[index].text == "(":
                self._refuse_cast(index)
            elif tokens[index].text == "static_cast" and tokens.at(index + 1) == "<":
                self._refuse_static_cast(index)
            elif tokens[index].kind == "name" and tokens.at(index - 1) != "::":
                index = self._rewrite_constructor(index, bodies)
                continue
            index += 1

    def _refuse_cast(self, index: int) -> None:
        """Refuse ``(T)`` before an operand."""
        tokens, closing = self.tokens, self.tokens.partner[index]
        operand = tokens.kind(closing + 1) in ("name", "number") or tokens.at(closing + 1) in OPERANDS
        called = tokens.at(index - 1) in (")", "]", "}") or not self._is_expression_context(index)
        if self._type(index + 1) == (closing, True) and operand and not called:
            self._refuse(index, index + 1, closing)

    def _refuse(self, index: int, begin: int, end: int) -> NoReturn:
        kind = self.tokens.text(begin, end)
        raise self.tokens[index].error(f"a cast to '{kind}', which is or may be a vector; write {kind}(...)")

    def _refuse_static_cast(self, index: int) -> None:
        closing = self.tokens.closing_angle(index + 1)
        if closing is not None and self._type(index + 2) == (closing, True):
            self._refuse(index, index + 2, closing)

    def _rewrite_constructor(self, index: int, bodies: list[tuple[int, int]]) -> int:
        """Rewrite ``T(...)`` or ``T name(...)`` at index; return where to continue."""
        tokens = self.tokens
        if tokens[index].text in ("const", *EXPRESSION_WORDS):
            return index + 1
        found = self._type(index)
        if found is None or not found[1]:
            return index + 1
        end = found[0]
        before = tokens.at(index - 1)
        if tokens.at(end) == "(" and self._is_expression_context(index) and not self._is_declarator(end):
            tokens[index].out = "::msl::construct<" + tokens[index].out
            tokens[end - 1].out += ">"
            return end
        if (
            tokens.kind(end) == "name"
            and tokens.at(end + 1) == "("
            and (tokens[end - 1].text in VECTORS | self.parameters or tokens.at(end - 1) == ">")
            and before in (";", "{", "}", "const", "constexpr", ")")
            and tokens.at(tokens.partner[end + 1] + 1) in (";", ",")
            and any(opening < index < closing for opening, closing in bodies)
            and tokens.partner[end + 1] > end + 2
        ):
            tokens[end].out += f" = ::msl::construct<{tokens.text(index, end)}>"
        return end

    def _is_declarator(self, opening: int) -> bool:
        """Whether ``(*name)[`` or ``(&name)(`` starts here, as in a declaration of a pointer or reference."""
        closing = self.tokens.partner[opening]
        return (
            self.tokens.at(opening + 1) in ("*", "&")
            and closing == opening + 3
            and self.tokens.at(closing + 1) in ("[", "(")
        )
