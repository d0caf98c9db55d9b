"""Every option of mlxrun with its default, its range and its description.

The string under a field is its description; its `Annotated` metadata is its range. Byte sizes are ints or
"4GB" strings. The JSON Schema, the config reference and `mlxrun config init` are generated from this module,
server_settings.py and media_settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlxrun.config.media_settings import MediaSettings as MediaSettings
from mlxrun.config.server_settings import ApiSettings as ApiSettings
from mlxrun.config.server_settings import ServedModelSettings as ServedModelSettings
from mlxrun.config.server_settings import ServerSettings as ServerSettings
from mlxrun.config.setting_annotations import Bytes, Range


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served, and how it is loaded."""

    path: str = "embedded"
    """`embedded` (a tiny built-in model), a local folder, a `.gguf` file, or a hub id such as
    `Qwen/Qwen3-0.6B`."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    kind: Literal["auto", "text", "vision", "embedding", "reranker"] = "auto"
    """`text`: by mlx-lm, `vision`: by mlx-vlm; `embedding`, `reranker`: a model that gives vectors or scores,
    and does not generate. `auto`: as the model's files say; `vision` if config.json has a `vision_config` and
    the checkpoint the weights of a vision tower."""
    adapter: str | None = None
    """Folder of a LoRA adapter of mlx-lm or mlx-vlm that all answers use."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Folders of LoRA adapters by name. A request chooses one in `model`, as `MODEL:NAME` or `NAME`; others
    are answered by the model as it is. docs/adapters.md says more."""
    pooling: Literal["mean", "cls", "last"] | None = None
    """How the states of tokens become an embedding, where the model's files do not say it. A model that
    generates gives embeddings beside its answers if this is set. docs/embeddings.md says more."""
    draft: str | None = None
    """A small model with the same tokenizer, as in `path`: it chooses the tokens of `prefill.sparse`, or
    drafts for `speculation`. For the latter it may also be a multi-token-prediction head of this model that
    mlx-vlm has split off."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory. `auto` keeps the type of the files on a GPU, and uses float32 on a CPU,
    where bfloat16 is slow."""
    dequantize: Literal["auto", "never", "always"] = "auto"
    """Hold quantized weights as plain numbers, which takes 2 to 8 times the memory. `auto`: where that takes
    at most half of the memory limit and is faster, as on CPUs; products are timed when a model is loaded.
    With engine.reproducible: on CPUs and CUDA, and where they take more than that, the model is refused.
    On Metal they stay quantized, and experts on every GPU, unless `always`."""
    names: tuple[str, ...] = ()
    """Names that requests may use as `model`, besides the path. Empty: every name is accepted."""
    context_length: Annotated[int | None, Range(16, None)] = None
    """Maximum number of tokens of a prompt and its answer together. null: the limit in the model's config. A
    greater value is a warning in the log: the model may give bad answers beyond what it was trained for."""
    chat_template: str | None = None
    """File with a Jinja chat template, which replaces that of the model."""
    chat_template_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`. Requests may override them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model: its tokenizer, or its `model_file`. A model that needs this
    is refused otherwise."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine computes."""

    reproducible: bool = False
    """Make answers independent of what else runs in the batch: prompts are prefilled one at a time in full
    chunks, and rows are decoded in batches of a fixed size. That is `scheduler.max_running` on a GPU, where
    it costs time only if few rows run, and 32 or 8 on a CPU, where OpenBLAS also has one thread. On CUDA,
    models whose weights are all plain need no fixed size."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What computes. `auto`: the GPU if there is one that MLX can use, else the CPU. `gpu`: an error where
    there is none."""
    blas_threads: Annotated[int | None, Range(1, 64)] = None
    """Threads of OpenBLAS on a CPU, whatever OPENBLAS_NUM_THREADS says. Their number decides the last digits
    of logprobs. null: 1 with engine.reproducible, which every machine has; else what OpenBLAS chooses, or as
    many as other processes leave cores free."""
    max_errors: Annotated[int, Range(1, 100)] = 5
    """Number of consecutive failed steps after which the engine stops. It goes on if the model still computes
    two tokens of no request."""
    load_check: Literal["cached", "always", True, False] = "cached"
    """When the model is loaded, compare what the engine computes (in chunks, in batches, from snapshots, of
    images) with the library's own calls, and replace what differs by a slower exact way. `cached`: a result
    is kept for a week for the same files, code, libraries, device, environment and settings, and compared
    again while the engine is idle. `always` or true: at each start. false: never."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Which requests run, and how many tokens of them a step computes."""

    policy: Literal["fcfs", "priority", "shortest", "fair"] = "fcfs"
    """Order of waiting requests: `fcfs` by arrival, `priority` by that field of the request (lower first),
    `shortest` by the tokens left to prefill, `fair` in turn for each API key."""
    aging: Annotated[float, Range(0, None)] = 30.0
    """Seconds after which a waiting request goes first under every policy; 0: never."""
    max_running: Annotated[int, Range(1, 4096)] = 32
    """Maximum number of requests (rows) that prefill or decode at the same time."""
    max_queue: Annotated[int, Range(1, None)] = 1024
    """Maximum number of waiting requests; further ones are refused as overloaded."""
    chunk: Annotated[int | None, Range(16, 65536)] = None
    """Maximum size of a prefill chunk in tokens; no chunk crosses a multiple of it. null: 4096 on CUDA, 512
    elsewhere, and at most prefill_budget."""
    prefill_budget: Annotated[int, Range(16, None)] = 4096
    """Maximum number of prompt tokens in a step while no row decodes."""
    prefill_budget_busy: Annotated[int | None, Range(16, None)] = None
    """The same while rows decode, which limits the time between their tokens. If more prompts wait than rows
    decode, it is raised in proportion, up to prefill_budget. null: 512 on Metal; 2048 on CUDA and 256 on a
    CPU, and fewer towards the end of a long prompt; at most one chunk."""
    step_ms: Annotated[int | None, Range(0, 60_000)] = None
    """Milliseconds that a step may take for prompts, by the pace of earlier steps: new requests wait for it.
    It takes 64 tokens at least. While nothing else runs or waits, steps of a prompt take a quarter of that
    on a CPU, and 0.3 on CUDA. 0: no limit. null: 100 on CUDA, 200 elsewhere; 0 for `mlxrun batch`."""
    prefill_rows: Annotated[int, Range(1, 256)] = 16
    """Maximum number of prompts whose chunks are computed in one forward. They must have the same length,
    unless the load check has found padding to be exact."""
    memory_limit: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Bytes for weights, KV caches and temporary arrays. null: on CUDA the GPU's memory; elsewhere 80 % of
    what is free at start, on Metal at most what it recommends (docs/machines.md)."""
    memory_headroom: Annotated[float, Range(0.0, 0.9)] = 0.05
    """Fraction of memory_limit that stays free."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The prefix cache: prompts that begin alike are prefilled only once. And, named `kv_`, the form of keys
    and values while rows decode."""

    backend: Literal["none", "memory", "disk"] = "memory"
    """Where entries are stored; `disk` uses memory too. A batch job stores its own beside its output."""
    memory_bytes: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Maximum size in memory. null: a quarter of scheduler.memory_limit less the weights."""
    disk_path: str | None = None
    """Folder of the disk backend, with one folder for each model in it. null: ~/.cache/mlxrun/prefixes."""
    disk_bytes: Annotated[int, Bytes(), Range(1, None)] = 20_000_000_000
    """Maximum size on disk for each model."""
    intervals_only: bool = False
    """Write to disk only what `checkpoint_every` asks for and what leaves memory, not the end of each prompt
    and answer. A crash then loses no more, but a restart finds less. A batch job's own cache always does."""
    checkpoint_every: Annotated[int, Range(16, None)] = 2048
    """Maximum number of prompt tokens, besides one chunk, that a crash may lose. It sets the distance between
    writes to disk, and between snapshots of recurrent and windowed layers."""
    stored_bits: Literal[8, 4] | None = None
    """Quantize entries to this many bits, so that two to four times as many fit. Answers after a hit may then
    differ."""
    kv_bits: Literal[8, 4] | None = None
    """Quantize the keys and values of rows that decode to this many bits, so that two to six times as many
    tokens fit. Answers change a little (docs/kv-quantization.md). null: as the model computes them."""
    kv_group_size: Literal[128, 64, 32] | None = None
    """Values that share a scale with kv_bits. null: 64, or 32 where heads do not divide into groups of 64."""
    kv_start: Annotated[int, Range(0, None)] = 0
    """With kv_bits, a row is quantized once it has this many tokens; shorter ones stay exact."""
    pinned_share: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Largest share of the cache's memory that prompts of `mlxrun cache warm` may take, which eviction leaves
    alone until they are unpinned. 0: nothing can be pinned."""
    image_bytes: Annotated[int | None, Bytes(), Range(0, None)] = None
    """Maximum size of the cache of image features, which saves encoding an image again; 0: off. It counts in
    scheduler.memory_limit. null: 256MB, at most an eighth of a given memory_limit."""


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Which tokens of a prompt are computed (docs/sparse-prefill.md)."""

    sparse: Literal["off", "draft"] = "off"
    """`draft`: of long prompts, only the tokens that `model.draft` finds important, so that answers begin
    sooner. They are then other answers, of a model that has not read all of the prompt. `off`: all tokens."""
    sparse_keep: Annotated[float, Range(0.01, 1.0)] = 0.2
    """Share of a prompt's tokens that are computed."""
    sparse_min_tokens: Annotated[int, Range(256, None)] = 8192
    """Prompts with fewer tokens than this, not counting those in the prefix cache, are computed whole."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Speculative decoding: tokens are predicted, and verified several at a time (docs/speculation.md)."""

    method: Literal["off", "auto", "ngram", "draft", "mtp"] = "off"
    """`ngram`: what followed the newest tokens where they came before, in the prompt or in the answer, is
    predicted to follow again. `draft`: `model.draft` predicts. `mtp`: the multi-token-prediction head of the
    model's checkpoint does. `auto`: `ngram`, and `model.draft` if it is set, or else the head if there is
    one, for each row what is expected to gain more; nothing where the model's decode batch cannot verify
    drafts, where the other methods are an error."""
    max_tokens: Annotated[int, Range(1, 32)] = 8
    """Maximum number of tokens that are predicted for a row in a step. As many are as have paid so far."""
    min_ngram: Annotated[int, Range(1, 16)] = 3
    """Number of newest tokens that must have come before."""
    max_ngram: Annotated[int, Range(1, 64)] = 8
    """Of several places, that is taken with the most tokens in common, counted up to this many."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Defaults for requests; null means the value in the model's generation_config.json."""

    temperature: Annotated[float | None, Range(0.0, 2.0)] = None
    """Sampling temperature; 0 is greedy. null: that of the model, else 1.0."""
    top_p: Annotated[float | None, Range(0.0, 1.0)] = None
    """Sample from the likeliest tokens whose probabilities sum to this. null: that of the model, else 1.0."""
    top_k: Annotated[int | None, Range(0, None)] = None
    """Sample from this many of the likeliest tokens; 0: all. null: that of the model, else 0."""
    min_p: Annotated[float | None, Range(0.0, 1.0)] = None
    """Drop tokens less likely than this fraction of the likeliest one. null: that of the model, else 0."""
    repetition_penalty: Annotated[float | None, Range(0.01, 10.0)] = None
    """Penalty on the logits of tokens that have occurred; 1 is none. null: that of the model, else 1.0."""
    max_tokens: Annotated[int | None, Range(1, None)] = None
    """Maximum number of tokens of an answer whose request sets none. null: 32768 (server) or 1024 (batch). An
    answer never gets more than the rest of the context."""
    seed: Annotated[int | None, Range(0, None)] = None
    """Seed of requests that have none. null: a random one for each request, which is reported."""


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """How answers are parsed into content, reasoning and tool calls; docs/tools.md lists the formats."""

    tools: str = "auto"
    """Tool-call parser: `auto` (by the chat template), `none` (calls stay in the content) or a name."""
    reasoning: str = "auto"
    """Reasoning parser: `auto` (by the chat template), `none` (reasoning stays in the content) or a name."""


@dataclass(frozen=True, slots=True)
class StructuredSettings:
    """How answers that must match a JSON schema are restricted."""

    close_objects: bool = False
    """Treat objects of a schema that have `properties`, and say nothing about others, as if they had
    `additionalProperties: false`. Small models invent further properties otherwise, some without end."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a batch job runs."""

    concurrency: Annotated[int | None, Range(1, 65536)] = None
    """Number of lines in progress. null: twice scheduler.max_running, so that the next prompts are ready; as
    many as max_running for a server's batches."""
    order: Literal["completion", "input"] = "completion"
    """Order of the lines in the output. The cells of a suite have `input` unless the config sets it."""
    on_invalid: Literal["skip", "fail"] = "skip"
    """What an invalid line does: `skip` reports it in the error file; `fail` stops the job before it runs, as
    `--strict` does."""
    retries: Annotated[int, Range(0, 10)] = 2
    """How often a line is retried after a transient error. Deterministic errors are not retried."""
    max_file_bytes: Annotated[int, Bytes(), Range(1, None)] = 1_000_000_000
    """Maximum size of a file that is uploaded to the server, and of the requests of a message batch."""
    keep_awake: Literal["auto", "always", "never"] = "auto"
    """Keep the machine awake while `mlxrun batch` or `mlxrun eval` runs; the display may go dark. `auto`: on
    macOS, by caffeinate. `always`: on Linux too, by systemd-inhibit, where there is one."""
    user_model: str | None = None
    """The model that plays the user in conversations whose lines have one, as in `model.path`. null: that of
    the job. docs/agent-evals.md says more."""


@dataclass(frozen=True, slots=True)
class WorkersSettings:
    """The workers of `mlxrun batch --ray` and `mlxrun serve --ray`. docs/scale.md says when they are worth
    it."""

    count: Annotated[int | None, Range(1, 4096)] = None
    """Number of workers, each with the whole model. null: one for each GPU of the cluster, or, where no
    machine has one, one for each machine."""
    resources: dict[str, str | int | float | bool] = field(default_factory=dict)
    """What a worker needs, in the names of Ray, such as `{GPU: 1, CPU: 4}`. Empty: one GPU where there are
    any, else all processors of a machine."""
    overrides: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Settings of single workers by number, such as `{1.scheduler.max_running: 16}`: workers are numbered
    from 0. Settings that change answers may not differ, such as those of `sampling`."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["text", "json"] = "text"
    """`text` for people, or `json` with one object a line."""
    prompts: bool = False
    """Allow the log to quote requests: invalid values, and at level debug whole requests and answers."""


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Traces of requests to `mlxrun serve`, by OpenTelemetry: `pip install 'mlxrun[telemetry]'`."""

    otlp: str | None = None
    """URL of an OTLP receiver, such as `http://127.0.0.1:4318`. It gets a span of each request to the model,
    and no text of prompts and answers. Variables of OpenTelemetry hold too, such as
    OTEL_EXPORTER_OTLP_HEADERS. null: no traces."""


@dataclass(frozen=True, slots=True)
class Config:
    """The config of a server or a batch job. An empty file is valid."""

    version: Literal[1] = 1
    """Version of the config format."""
    models: dict[str, str | ServedModelSettings] = field(default_factory=dict)
    """The models of a server that has several, by the names that requests use: `chat: ORG/NAME`, or with more
    keys, `coder: {path: ORG/NAME, keep_alive: 600}`. Each is loaded when a request needs it. It is unloaded
    when it is idle or another one needs its memory (docs/several-models.md)."""
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    parsers: ParserSettings = field(default_factory=ParserSettings)
    structured: StructuredSettings = field(default_factory=StructuredSettings)
    apis: ApiSettings = field(default_factory=ApiSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    workers: WorkersSettings = field(default_factory=WorkersSettings)
    log: LogSettings = field(default_factory=LogSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
