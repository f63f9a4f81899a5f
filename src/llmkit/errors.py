"""Every error that llmkit raises on purpose, each with a message that a user can act on."""

from __future__ import annotations


class LlmkitError(Exception):
    """Base of all deliberate errors.

    `hint` says what to do about it; the command line prints message and hint as one paragraph.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class ConfigError(LlmkitError):
    """A setting is unknown, has a bad value, or contradicts another one."""


class PluginError(LlmkitError):
    """A plugin cannot be found, loaded, or used here."""


class PluginChoiceError(PluginError, ConfigError):
    """A setting chooses a plugin that does not exist, that is switched off, or that several distributions offer."""


class ModelError(LlmkitError):
    """A model folder or file is missing, damaged, or of an unsupported architecture."""


class InvalidRequestError(LlmkitError):
    """A request is refused at the door. `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class OutOfMemoryError(LlmkitError):
    """The model or its KV cache does not fit; the message says what each part takes."""


class EngineError(LlmkitError):
    """The engine cannot go on with a request, or at all."""


class EngineClosedError(EngineError):
    """The engine was used after `close()`."""


class EngineDeadError(EngineError):
    """The engine has ended by itself and does not come back; the message says why."""


class EngineDrainingError(EngineError):
    """The engine finishes what it has and takes no new requests."""


class RequestFailedError(EngineError):
    """A request that had been taken in could not be answered."""


class EngineOverloadedError(RequestFailedError):
    """A request waited for its turn as long as one may. Sent again later, it may be answered."""


class RequestTimeoutError(RequestFailedError, TimeoutError):
    """A request was not done within the time that its caller gave it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device has no memory left: our own error, or torch's, which is not imported here."""
    return isinstance(error, OutOfMemoryError) or type(error).__name__ == "OutOfMemoryError"


def renewed(error: EngineError) -> EngineError:
    """The same error once more, for another caller: raising one object many times piles up their tracebacks in it."""
    return type(error)(error.message, hint=error.hint)


def shown(value: object, limit: int = 80) -> str:
    """How `value`, which may be anything, reads in a message: its repr, cut to `limit` characters. Never raises."""
    try:
        text = repr(value)
    except Exception:  # a repr of the caller's own, or an integer of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def described(error: BaseException) -> str:
    """Type and message of somebody else's exception. Never raises."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
