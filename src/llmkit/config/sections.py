"""The sections of the engine's configuration. Field descriptions are the reference documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PluginChoice = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked when built, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        # Python takes True for 1: `max_num_seqs: true` would otherwise run one sequence at a time.
        if isinstance(value, bool) and info.field_name is not None:
            types = {cls.model_fields[info.field_name].annotation}
            types |= {t for outer in types for t in get_args(outer)}
            if bool not in types and types & {int, float}:
                raise ValueError("a boolean is not a number")
        return value


class ModelConfig(Section):
    """Which model, and how its weights are held."""

    model: str = Field(default="", description="Folder, GGUF file, or name in the llmkit cache (`llmkit models list`).")
    tokenizer: str | None = Field(
        default=None, description="Folder or file to take the tokenizer from; default: the model."
    )
    skip_tokenizer: bool = Field(default=False, description="Load no tokenizer: only token ids in and out.")
    load_format: PluginChoice = Field(default="auto", description="Weights plugin; auto: by what the files are.")
    implementation: PluginChoice = Field(
        default="auto",
        description="Model plugin; auto: the one called by the model's architecture, else the best that serves it.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and activations. auto: the checkpoint's, but float32 on a processor without "
        "fast bfloat16.",
    )
    quantization: PluginChoice = Field(
        default="auto",
        description="Quantization plugin for the weights of linear layers. auto: on the CPU the one that holds a "
        "file's 4- or 8-bit weights as they are, unless dtype names a type; else none.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest sequence, prompt and output, in tokens; default: what the model allows.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of dummy weights and of requests without a seed.")
    generation_config: bool = Field(default=True, description="Take sampling defaults from generation_config.json.")
    chat_template: str | None = Field(
        default=None, description="Jinja chat template, as text or as the path of a file."
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Keys of the model's config.json to replace (for tests and experiments)."
    )


class SchedulerConfig(Section):
    """Who runs when."""

    policy: PluginChoice = Field(default="auto", description="Scheduling policy plugin.")
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Token budget of a step; default by device (CPU: 2048; GPU: 8192 or 16384, in a server 2048 or "
        "8192).",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Most sequences that run at once; default by device (CPU: 256, in a server 128).",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Spread a prompt over several steps when it must be."
    )
    async_scheduling: bool | Literal["auto"] = Field(
        default="auto", description="Plan step n+1 while step n runs, where the executor allows it."
    )


class AttentionConfig(Section):
    """How attention is computed."""

    backend: PluginChoice = Field(default="auto", description="Attention plugin.")


class KVCacheConfig(Section):
    """The key/value cache."""

    block_size: int | None = Field(
        default=None, ge=1, description="Tokens per block; a multiple of the attention plugin's page. Default 16."
    )
    num_blocks: int | None = Field(default=None, ge=2, description="Number of blocks; default: what the memory allows.")
    memory_gib: float | None = Field(default=None, gt=0, description="Size of the cache in GiB, instead of num_blocks.")
    gpu_memory_utilization: float = Field(
        default=0.92, gt=0, le=1, description="Share of the GPU's memory that the engine may use."
    )
    cpu_memory_utilization: float = Field(
        default=0.4, gt=0, le=1, description="On the CPU: share of the free memory that the cache may grow to."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        default="auto",
        description="Type of the cached keys and values; auto: the model's. fp8: float8 (e4m3), half the memory of a "
        "16-bit cache; numbers beyond 448 become 448.",
    )
    swap_space_gib: float | None = Field(
        default=None,
        ge=0,
        description="Host memory in GiB for the blocks of preempted requests, where the scheduling policy preempts by "
        "swap; 0: none, they are computed again. Default: as much as the cache, at most 4 and at most a quarter of "
        "the free memory.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse blocks of earlier requests with the same prefix."
    )
    event_publisher: PluginChoice | None = Field(
        default=None,
        description="Publish what the prefix cache holds: NAME activates the extension kv-events-NAME; default: none.",
    )


class ConnectorConfig(Section):
    """KV transfer and offload."""

    name: PluginChoice | None = Field(default=None, description="Connector plugin; none by default.")
    role: Literal["both", "producer", "consumer"] = Field(
        default="both", description="Whether it only stores (producer), only loads (consumer), or both."
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="What becomes of a request whose blocks could not be loaded: its tokens are computed, or it ends "
        "with an error.",
    )
    load_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds after which a load, or the connector's answer whether there is one, is no longer waited "
        "for.",
    )


class StructuredConfig(Section):
    """Structured output."""

    backend: PluginChoice = Field(
        default="auto", description="Grammar plugin; auto: for each request the best one that can express it."
    )
    compile_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Longest that a grammar may take to compile, in seconds of processor time; "
        "three times that by the clock.",
    )
    compile_wait_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest that a request waits for the compilations of others, and for engines that fail, until one "
        "begins with its grammar, in seconds. Default: 15 in AsyncLLM and llmkit serve, no limit in LLM.",
    )
    compile_memory_mib: int = Field(
        default=1024, ge=16, description="Most memory that the compilation of a grammar may take, in MiB."
    )
    compile_processes: int = Field(default=2, ge=1, le=64, description="Grammars that are compiled at a time.")
    mask_timeout_s: float = Field(
        default=1.0,
        gt=0,
        description="Longest that finding the tokens allowed at one place may take, in seconds of processor time; a "
        "request that needs longer ends with an error, as does one whose slow places take 30 times as long together.",
    )
    cache_mib: int = Field(default=256, ge=0, description="Compiled grammars that are kept, in MiB.")
    preload_grammars: bool | None = Field(
        default=None,
        description="Whether the engine imports the grammar library and starts the process that compiles before it "
        "takes requests, not with the first grammar, while others wait for their tokens. Default: yes in AsyncLLM and "
        "llmkit serve, no in LLM.",
    )
    max_whitespace: int = Field(
        default=32, ge=1, le=1024, description="Most blanks in a row between two tokens of JSON."
    )


class ExecutionConfig(Section):
    """Where and how the model runs."""

    executor: PluginChoice = Field(default="auto", description="Executor plugin.")
    kernels: PluginChoice = Field(default="auto", description="Kernel table plugin.")
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$",
        description='"cpu", "cuda", "cuda:1" or auto: the first GPU, else the CPU.',
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads; default: the processors of this process."
    )
    max_logprobs: int = Field(
        default=20, ge=0, description="Most log-probabilities a request may ask for per position."
    )


class ProcessConfig(Section):
    """The engine in a process of its own, and the supervision of that process."""

    heartbeat_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between two signs of life.")
    heartbeat_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds without a sign of life after which a process with something to do is taken for hung, and "
        "killed.",
    )
    hang_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest that one step may take, in seconds; the process is killed then, signs of life or not. "
        "Loading the model may take any time, at a wake-up, too.",
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="How often a process that has crashed by itself is started again within restart_window_s. Crashes "
        "that a request can have caused do not count: that request fails. 0: no process is ever started again.",
    )
    restart_window_s: float = Field(default=60.0, gt=0, description="Seconds within which max_restarts are counted.")
    stop_timeout_s: float = Field(
        default=10.0, ge=0, description="Seconds that the process has to end in good order before it is killed."
    )


class ParallelConfig(Section):
    """Several devices."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=1, description="Tensor parallel size; only 1 is supported.")


class ObservabilityConfig(Section):
    """Logs and measurements."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Level of llmkit's log."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="How the server and its engine process log: lines for people, or a JSON object each.",
    )
    log_requests: bool = Field(default=True, description="The server logs a line for every request that has ended.")
    log_prompts: bool = Field(default=False, description="That line shows the prompt's text.")
    otlp_traces_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="Where the server sends a span for every request, OpenTelemetry's protocol over HTTP, such as "
        "http://localhost:4318/v1/traces; default: nowhere.",
    )


class PluginsConfig(Section):
    """The plugin system itself."""

    auto: Literal["builtin", "any"] = Field(
        default="builtin",
        description="Whether `auto` chooses only among llmkit's own plugins, or third-party ones too.",
    )
    safe_mode: bool = Field(default=False, description="Ignore every third-party distribution.")
    strict: bool = Field(default=False, description="Refuse to start while any installed plugin is broken.")
    disable: tuple[Annotated[str, Field(pattern=r"^[^:\s]+:\S+$")], ...] = Field(
        default=(), description="Plugins to leave out, each as kind:name or kind:distribution:name."
    )
    options: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict, description="Options of plugins: kind → name → option → value."
    )
