"""Which formats of tool calls and of reasoning a model's answers are read in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from llmkit.errors import InvalidRequestError, PluginError

if TYPE_CHECKING:
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.reasoning_parser import ReasoningFormat
    from llmkit.hookspecs.tool_parser import ToolFormat
    from llmkit.registry import Registry

_FITS = {"tool_parser": "llmkit_tool_format_fits", "reasoning_parser": "llmkit_reasoning_format_fits"}


def tool_format(
    registry: Registry, choice: str | None, chat_template: str | None, environment: Environment
) -> ToolFormat | None:
    """The format of `server.tool_parser`. choice: "auto": the one that says that it fits the chat template, None if
    none does or more than one; None: none.

    Raises PluginError if the plugin that was asked for cannot be used, ConfigError for its options.
    """
    return cast("ToolFormat | None", _format("tool_parser", registry, choice, chat_template, environment))


def reasoning_format(
    registry: Registry, choice: str | None, chat_template: str | None, environment: Environment
) -> ReasoningFormat | None:
    """The format of `server.reasoning_parser`, chosen as `tool_format` is."""
    return cast("ReasoningFormat | None", _format("reasoning_parser", registry, choice, chat_template, environment))


def no_tool_format(registry: Registry, param: str = "tools") -> InvalidRequestError:
    """The error for a request with tools where it is not known how the model writes calls: its answer would hold the
    calls as text, and the client would wait for them in vain."""
    names = ", ".join(sorted(row.name for row in registry.find("tool_parser")))
    return InvalidRequestError(
        f"{param} cannot be used: this model's chat template does not tell in which format it writes tool calls.",
        param=param,
        hint=f'Start the server with --tool-call-parser ({names}), or send tool_choice "none".',
    )


def _format(
    kind: str, registry: Registry, choice: str | None, chat_template: str | None, environment: Environment
) -> Any:
    if choice is None:
        return None
    if choice != "auto":
        return registry.create(kind, choice, environment)
    fitting, rejected = [], {}
    plugins, others = registry.candidates(kind, environment)
    for plugin in plugins:
        try:
            fits = bool(chat_template) and bool(plugin.ask(_FITS[kind], chat_template=chat_template))
        except PluginError as error:
            rejected[plugin.row.name] = error.message
            continue
        if fits:
            fitting.append(plugin)
        else:
            rejected[plugin.row.name] = "the chat template does not show its marks"
    if len(fitting) != 1:
        # Two readings of one template are a guess, and a wrong one would turn text into calls.
        return None
    built = registry.build(fitting[0], {})
    reason = "the chat template shows its marks"
    registry.note_choice(fitting[0], "auto", reason, {**others, **rejected})
    return built
