"""The sandbox that chat templates run in."""

from __future__ import annotations

import json
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmkit.errors import InvalidRequestError

MAX_BLOCKS = 1_000_000
"""Blocks (loop bodies, branches) that one rendering may enter: a second's work, and far above any real chat."""

MAX_REPEATED = 1_000_000
"""Longest text or list that `*` may make."""

_blocks_left: ContextVar[int] = ContextVar("blocks_left")


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the messages, through `raise_exception`."""


class _CountingGenerator(CodeGenerator):
    """Compiles a count into every block, so that no loop is endless, whatever it does."""

    def blockvisit(self, body: Any, frame: Frame) -> None:
        self.writeline("environment.enter_block()")
        super().blockvisit(body, frame)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja without ways out: no unsafe attributes, no mutation of arguments, bounded loops and products."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def enter_block(self) -> None:
        left = _blocks_left.get() - 1
        if left < 0:
            raise SecurityError(f"it entered more than {MAX_BLOCKS} blocks; is there an endless loop?")
        _blocks_left.set(left)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1000 or abs(right) > 100):
            raise SecurityError("a power is too large.")
        if operator == "*" and _repeated_length(left, right) > MAX_REPEATED:
            raise SecurityError("a repeated text is too long.")
        return super().call_binop(context, operator, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    """Length of `left * right` if one of them is a text or list, else 0."""
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            return len(sequence) * count
    return 0


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class CompiledTemplate:
    """A template ready to render. `takes_parts`: it loops over a message's content, so it reads lists of parts."""

    def __init__(self, template: jinja2.Template, name: str, takes_parts: bool) -> None:
        self._template = template
        self._name = name
        self.takes_parts = takes_parts

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises InvalidRequestError with the template's own words if it refuses or fails."""
        token = _blocks_left.set(MAX_BLOCKS)
        try:
            return self._template.render(variables)
        except TemplateRefusal as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # the template is a foreign program: whatever it raises is the request's error
            raise InvalidRequestError(
                f"{self._name} fails with these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        finally:
            _blocks_left.reset(token)


def compile_template(source: str, name: str) -> CompiledTemplate:
    """Compile Jinja text. Raises InvalidRequestError naming the template, line and problem of a syntax error."""
    environment = TemplateEnvironment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"{name} has a syntax error in line {error.lineno}: {error.message}", param="chat_template"
        ) from error
    except RecursionError as error:
        raise InvalidRequestError(f"{name} is nested too deeply.", param="chat_template") from error
    return CompiledTemplate(template, name, _loops_over_content(tree))


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, or over a variable that was set from it."""
    names: set[str] = set()
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether `node` is a message's content as it stands, perhaps filtered; not text made from it."""
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
