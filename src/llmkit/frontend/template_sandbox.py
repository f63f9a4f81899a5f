"""The sandbox that chat templates run in."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
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
from llmkit.frontend.chat_messages import TemplateLimitError
from llmkit.frontend.template_limits import MAX_CHARACTERS, characters, check_call, check_operation, measured

MAX_BLOCKS = 1_000_000
"""Blocks (loop bodies, branches) that one rendering may enter: a second's work, and far above any real chat."""

MAX_SECONDS = 5.0
"""Processor time that one rendering may take."""

_REMOVED_FILTERS = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat needs and that make much of little."""

_account: ContextVar[_Account] = ContextVar("account")


class _Account:
    """What one rendering has left."""

    def __init__(self) -> None:
        self.blocks = MAX_BLOCKS
        self.characters = MAX_CHARACTERS
        self.end = time.thread_time() + MAX_SECONDS


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the messages, through `raise_exception`."""


class _CountingGenerator(CodeGenerator):
    """Compiles a count into every block, so that no loop is endless, whatever it does, and a measurement into the
    operations that can make large values or take long for them."""

    def blockvisit(self, body: Any, frame: Frame) -> None:
        text = sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
        self.writeline(f"environment.enter_block({text})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.measured(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja without ways out: no unsafe attributes, no mutation of arguments, bounded loops and products."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_put_out
        )
        self.filters["tojson"] = _to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _checked_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern[:256])
        self.measured = measured

    def enter_block(self, characters: int) -> None:
        """A block with `characters` characters of literal text is entered."""
        account = _account.get()
        account.blocks -= 1
        if account.blocks < 0:
            raise SecurityError(f"it entered more than {MAX_BLOCKS} blocks; is there an endless loop?")
        if time.thread_time() > account.end:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds.")
        _take_characters(characters)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """What `~` makes of its operands."""
        if sum(map(characters, parts)) > MAX_CHARACTERS:
            raise SecurityError("a text is too long.")
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            name = method.__name__
            if name == "translate":
                raise SecurityError("translate is not allowed.")
            check_call(name, owner, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _put_out(value: Any) -> Any:
    _take_characters(characters(value))
    return value


def _take_characters(count: int) -> None:
    account = _account.get(None)
    if account is not None:  # at compile time constants are put out too
        account.characters -= count
        if account.characters < 0:
            raise SecurityError(f"it puts out more than {MAX_CHARACTERS} characters.")


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its operands measured first. The first of them may be the environment or context."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        subject, *others = args[skipped:] or (None,)
        check_call(name, subject, (*others, *kwargs.values()))
        return function(*args, **kwargs)

    return checked


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
        token = _account.set(_Account())
        try:
            return self._template.render(variables)
        except TemplateRefusal as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # the template is a foreign program: whatever it raises is the request's error
            kind = TemplateLimitError if isinstance(error, SecurityError) else InvalidRequestError
            raise kind(
                f"{self._name} fails with these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        finally:
            _account.reset(token)


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
    except (RecursionError, MemoryError) as error:  # the parser of Python calls its own overflow MemoryError
        raise InvalidRequestError(f"{name} is nested too deeply.", param="chat_template") from error
    except Exception as error:  # constants are computed here: whatever they raise is the template's error
        raise InvalidRequestError(
            f"{name} cannot be compiled: {type(error).__name__}: {error}", param="chat_template"
        ) from error
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
