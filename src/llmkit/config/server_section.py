"""The section of the HTTP server. Field descriptions are the reference documentation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmkit.config.sections import PluginChoice, Section

NonEmpty = Annotated[str, Field(min_length=1)]


class ServerConfig(Section):
    """The HTTP server, `llmkit serve`."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every IPv4 interface."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any that is free.")
    uds: str | None = Field(
        default=None,
        description="Path of a Unix socket to listen on instead of host and port; only its owner may connect.",
    )
    served_model_names: tuple[NonEmpty, ...] = Field(
        default=(), description="Names under which clients ask for the model; default: the model as given."
    )
    api_keys: tuple[NonEmpty, ...] = Field(
        default=(),
        description="Keys of which clients must send one, for /v1, /v2, /inference and the control endpoints; the "
        "environment variable does not show in a list of processes.",
    )
    root_path: str = Field(
        default="", pattern=r"^(/[^\s?#]*[^/\s?#])?$", description="Path under which a proxy shows the server."
    )
    allowed_origins: tuple[NonEmpty, ...] = Field(
        default=(), description="Origins whose web pages may use the server (CORS); * is any. Default: none."
    )
    allowed_methods: tuple[NonEmpty, ...] = Field(default=("*",), description="Methods allowed to those origins.")
    allowed_headers: tuple[NonEmpty, ...] = Field(
        default=("*",), description="Request headers allowed to those origins."
    )
    allow_credentials: bool = Field(default=False, description="Let those origins send cookies and authorization.")
    ssl_keyfile: str | None = Field(default=None, description="Private key for TLS, a PEM file.")
    ssl_certfile: str | None = Field(default=None, description="Certificate for TLS, a PEM file; switches TLS on.")
    ssl_ca_certs: str | None = Field(
        default=None,
        description="Certificates of those who may sign clients' certificates; clients must then have one.",
    )
    middleware: tuple[NonEmpty, ...] = Field(
        default=(), description="ASGI middleware to wrap the routes in, each module:attribute; the first is outermost."
    )
    max_queue: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Sequences that may wait beside those that run; a request beyond is refused with 429.",
    )
    rate_limit: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Requests a minute for each API key, or for each client address if there are no keys; default: "
        "unlimited.",
    )
    max_body_bytes: int = Field(
        default=32 * 2**20, ge=1024, description="Largest body of a request in bytes; more is refused with 413."
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Longest that a request may take in all, in seconds; default: unlimited."
    )
    max_stored_responses: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Responses of /v1/responses that are kept in memory; those longest unused are forgotten first.",
    )
    max_stored_response_bytes: int = Field(
        default=256 * 2**20, ge=0, description="Bytes that these may take together, conversations included."
    )
    stuck_after_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without a finished step while work is pending after which /health answers 503.",
    )
    keep_alive_s: int = Field(
        default=75,
        ge=0,
        le=86400,
        description="Seconds after which a connection is closed on which nothing comes after an answer; more than "
        "clients and proxies keep theirs, or a request may meet the end of its connection.",
    )
    shutdown_timeout_s: float = Field(
        default=120.0,
        ge=0,
        description="How long requests that are under way may take to finish after SIGTERM, in seconds.",
    )
    tool_parser: PluginChoice | None = Field(
        default="auto",
        description="Format of tool calls in answers; auto: the one that the chat template shows, if any; null: none.",
    )
    reasoning_parser: PluginChoice | None = Field(
        default="auto",
        description="Marks of reasoning in answers; auto: those that the chat template shows, if any; null: none.",
    )
    enable_control_endpoints: bool = Field(
        default=False,
        description="Serve /sleep, /wake_up, /is_sleeping, /reset_prefix_cache, /pause, /resume, /start_profile, "
        "/stop_profile and /server_info.",
    )
    playground: bool = Field(default=True, description="Show a page at / with a chat and a live view of the engine.")
    metrics_prefix: str = Field(
        default="llmkit:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", description="What names of metrics begin with."
    )
    access_log: bool = Field(default=True, description="Log a line for every request.")
