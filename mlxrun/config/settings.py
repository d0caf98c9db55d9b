"""Every option mlxrun reads, with its default, its range and its meaning; nothing else is an option.

The JSON Schema, the config reference and `mlxrun config init` are made from this module: the docstring
under a field is its description, `Annotated` metadata is its range. Byte sizes are ints or "4GB" strings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number; None leaves a side open."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Marks an int field that also takes a string with a unit (kB, MB, GB: powers of 1000; KiB ...: of
    1024)."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Marks a field that is never printed and that may only come from `${ENV_NAME}`."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how it is loaded."""

    path: str = "embedded"
    """`embedded` (the built-in tiny model), a local folder, or a hub id such as `Qwen/Qwen3-0.6B`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    kind: Literal["auto", "text", "vision"] = "auto"
    """`text` loads through mlx-lm, `vision` through mlx-vlm; `auto` looks for `vision_config` in
    config.json."""
    adapter: str | None = None
    """Folder of a LoRA adapter that is applied at load."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory; `auto` keeps the file's, but float32 on a CPU, where bfloat16 is
    slow."""
    names: tuple[str, ...] = ()
    """Names that a request may give as `model`, besides the path; empty: any name is taken."""
    context_length: Annotated[int | None, Range(16, None)] = None
    """Most tokens of prompt and answer together; null: what the model's config says."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the model's own."""
    chat_template_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`; a request may override them."""
    trust_remote_code: bool = False
    """Let the tokenizer run Python code that comes with the model."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine computes."""

    reproducible: bool = False
    """Same bytes whatever else runs: prompts one by one in whole chunks; decode row by row on a CPU, at a
    fixed width with one attention call a row on a GPU. Slower."""
    max_errors: Annotated[int, Range(1, 100)] = 5
    """This many failed steps in a row stop the engine."""
    probe: bool = True
    """At load, compare batched with alone for a few short prompts and fall back to the safe way where
    they differ."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Who runs next, and how much of it."""

    policy: Literal["fcfs", "priority", "shortest", "fair"] = "fcfs"
    """Order of waiting prompts: arrival, `priority` of the request, least prefill left, or round robin by
    key."""
    aging: Annotated[float, Range(0, None)] = 30.0
    """Seconds after which a waiting request goes first whatever the policy says; 0: never."""
    max_running: Annotated[int, Range(1, 4096)] = 32
    """Most requests that prefill or decode at once (rows)."""
    max_queue: Annotated[int, Range(1, None)] = 1024
    """Most requests that wait; one more is refused as overloaded."""
    chunk: Annotated[int | None, Range(16, 65536)] = None
    """Grid of prefill: no chunk reaches over a multiple of this many tokens. null: 4096 on CUDA, 512
    elsewhere."""
    prefill_budget: Annotated[int, Range(16, None)] = 4096
    """Most prompt tokens a step while nothing decodes."""
    prefill_budget_busy: Annotated[int | None, Range(16, None)] = None
    """The same while rows decode: bounds the time between their tokens. More, up to prefill_budget, if more
    prompts wait than rows decode, in that proportion. null: 512 on a GPU; 256 on a CPU, fewer deep in a long
    prompt; at most a chunk."""
    prefill_rows: Annotated[int, Range(1, 256)] = 8
    """Most prompts whose chunks share one forward; only chunks of equal length do, unless the probe
    allows padding."""
    memory_limit: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Bytes for weights, rows and transients; null: what the device recommends (GPU) or 80 % of free
    memory (CPU)."""
    memory_headroom: Annotated[float, Range(0.0, 0.9)] = 0.05
    """Share of the limit that is kept free."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The prefix cache: what was computed for one prompt serves every other that begins like it."""

    backend: Literal["none", "memory", "disk"] = "memory"
    """Where prefixes are kept; `disk` has memory in front. A job keeps its own on disk beside its output."""
    memory_bytes: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Most bytes in memory; null: a quarter of what weights leave of scheduler.memory_limit."""
    disk_path: str | None = None
    """Folder of the disk backend; each model has its own in it. null: ~/.cache/mlxrun/prefixes."""
    disk_bytes: Annotated[int, Bytes(), Range(1, None)] = 20_000_000_000
    """Most bytes on disk, for each model."""
    checkpoint_every: Annotated[int, Range(16, None)] = 2048
    """Saves to disk, and copies of recurrent or windowed layers' states, are so close to each other that a
    crash costs at most so many tokens of a prompt, and one chunk."""
    stored_bits: Literal[8, 4] | None = None
    """Quantise what is kept, to hold two to four times as much. Not exact: answers after a hit may differ."""
    image_bytes: Annotated[int, Bytes(), Range(0, None)] = 256_000_000
    """Most bytes for the features of images seen before, so that they are not encoded again; 0: off."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Defaults for what a request leaves out; null leaves it to the model's generation_config.json."""

    temperature: Annotated[float | None, Range(0.0, 10.0)] = None
    """0 is greedy; null: the model's own, else 1.0."""
    top_p: Annotated[float | None, Range(0.0, 1.0)] = None
    """Keep the likeliest tokens that sum to this; null: the model's own, else 1.0."""
    top_k: Annotated[int | None, Range(0, None)] = None
    """Keep this many tokens, 0: all; null: the model's own, else 0."""
    min_p: Annotated[float | None, Range(0.0, 1.0)] = None
    """Drop tokens less likely than this share of the likeliest; null: the model's own, else 0."""
    repetition_penalty: Annotated[float | None, Range(0.01, 10.0)] = None
    """Divide the logits of tokens seen so far; null: the model's own, else 1.0."""
    max_tokens: Annotated[int | None, Range(1, None)] = None
    """Longest answer; null: up to the context's end (server) or 1024 (batch)."""
    seed: Annotated[int | None, Range(0, None)] = None
    """Seed of requests that give none; null: one is drawn for each and reported."""


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """How answers are split into text, thought and tool calls; docs/tools.md lists the formats."""

    tools: str = "auto"
    """Format of tool calls: `auto` (by the chat template), `none` (calls stay text) or a name."""
    reasoning: str = "auto"
    """Format of thoughts: `auto` (by the chat template), `none` (thoughts stay text) or a name."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Which interfaces the server has; the paths of one that is off are not found."""

    openai: bool = True
    """/v1/models, /v1/chat/completions, /v1/completions."""
    responses: bool = True
    """/v1/responses."""
    anthropic: bool = True
    """/v1/messages, /v1/messages/count_tokens."""
    tokenize: bool = True
    """/tokenize, /detokenize."""
    batches: bool = True
    """/v1/files, /v1/batches."""
    admin: bool = True
    """/v1/status, /metrics, /v1/cache, /v1/requests/ID/cancel, /openapi.json. /health is always there."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens, whom it serves, and how much one client may ask of it."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs api_keys, or allow_public."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0: any that is free."""
    api_keys: Annotated[dict[str, str], Secret()] = field(default_factory=dict)
    """Keys that clients must give, by the name of who has it (`alice: ${ALICE_KEY}`): names are in the log,
    and scheduler.policy fair shares among them. Empty: no key is asked for."""
    allow_public: bool = False
    """Listen on an address that other machines reach, although there are no api_keys."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may use the server from a browser, as `https://chat.example.com`, or `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients reach the server besides localhost and server.host, such as `ai.example.com`
    behind a proxy, or `*` for all. While there are no api_keys, requests for other names are refused on an
    address of this machine: a web page may have had its own name point here."""
    max_body_bytes: Annotated[int, Bytes(), Range(1, None)] = 64_000_000
    """Largest body of a request; uploads of job files have their own limit."""
    max_messages: Annotated[int, Range(1, None)] = 4096
    """Most messages, or input items, of one request."""
    max_prompt_tokens: Annotated[int | None, Range(1, None)] = None
    """Most tokens of one prompt; null: what the context holds."""
    max_connections: Annotated[int, Range(1, None)] = 1024
    """Most open connections; one more is answered 503."""
    request_timeout: Annotated[float | None, Range(0.1, None)] = 3600.0
    """Seconds that a request may take, waiting included; it is then aborted. null: no limit."""
    keepalive: Annotated[float, Range(0.1, None)] = 15.0
    """Seconds after which a stream that has nothing to say sends a line that says how far the request is."""
    drain_timeout: Annotated[float, Range(0.0, None)] = 30.0
    """Seconds that running requests get to finish once the server is told to stop."""
    on_engine_failure: Literal["exit", "stay"] = "exit"
    """When the engine has died: end the process (exit code 3), so that a supervisor restarts it, or stay and
    answer 503."""
    strip_billing_header: bool = True
    """Drop the line `x-anthropic-billing-header: ...` from the system prompt of /v1/messages: it differs in
    every request, and no prefix would be found again."""
    store_responses: Annotated[int, Range(0, None)] = 1000
    """Most answers of /v1/responses that are kept in memory for previous_response_id; 0: none."""
    store_bytes: Annotated[int, Bytes(), Range(1, None)] = 256_000_000
    """Most bytes of these."""
    data_path: str | None = None
    """Folder for uploaded files and batches. null: mlxrun under $XDG_DATA_HOME or ~/.local/share."""
    files_max_bytes: Annotated[int, Bytes(), Range(1, None)] = 10_000_000_000
    """Most bytes of files and batches in data_path, each counted as 4096 at least; an upload or a batch that
    would exceed it is refused. What a batch answers counts, but is never refused."""


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Which images are taken, and how large."""

    allow_urls: bool = False
    """Fetch http(s) image URLs."""
    allow_hosts: tuple[str, ...] = ()
    """If URLs are allowed, only from these hosts; empty: any public one."""
    roots: tuple[str, ...] = (".",)
    """Folders that image paths of a job may point into, relative to the job file; nothing outside is read."""
    max_bytes: Annotated[int, Bytes(), Range(1, None)] = 20_000_000
    """Largest encoded image."""
    max_pixels: Annotated[int, Range(1, None)] = 50_000_000
    """Largest decoded image, width x height."""
    max_images: Annotated[int, Range(1, 1024)] = 16
    """Most images in one request."""
    timeout: Annotated[float, Range(0.1, None)] = 20.0
    """Seconds for one URL."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a job runs."""

    concurrency: Annotated[int | None, Range(1, 65536)] = None
    """Lines in flight; null: twice scheduler.max_running, so that the next prompts are ready."""
    order: Literal["completion", "input"] = "completion"
    """Order of the output lines."""
    on_invalid: Literal["skip", "fail"] = "skip"
    """A bad line becomes an error record, or stops the job before anything runs (as `--strict` does)."""
    retries: Annotated[int, Range(0, 10)] = 2
    """How often a line is tried again after a transient error; deterministic errors are not tried again."""
    max_file_bytes: Annotated[int, Bytes(), Range(1, None)] = 1_000_000_000
    """Largest job file that can be uploaded to the server."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is shown."""
    format: Literal["text", "json"] = "text"
    """Lines for people or for machines."""
    prompts: bool = False
    """Let the log quote requests: what is wrong in them, and at level debug all of them and the answers."""


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run. An empty file is a valid config."""

    version: Literal[1] = 1
    """Version of this format."""
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    parsers: ParserSettings = field(default_factory=ParserSettings)
    apis: ApiSettings = field(default_factory=ApiSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    log: LogSettings = field(default_factory=LogSettings)
