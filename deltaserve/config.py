# SPDX-License-Identifier: Apache-2.0
"""Configuration of every role: one typed model each; flags, environment and file give the same fields.

`deltaserve router --port 8000`, `DELTASERVE_ROUTER_PORT=8000` and `"port": 8000` in a JSON file under "router"
mean the same. `deltaserve.cli.options` makes the flags out of these models, so a field exists once. Every address
is loopback unless somebody says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Role = Literal["prefill", "decode"]
"""What a worker does: `prefill` computes N-1 prompt tokens and publishes; `decode` restores and generates."""

CacheDtype = Literal["auto", "bfloat16", "fp8"]
"""Of attention's cached rows; auto: the model's own."""

Damage = Literal["none", "flip", "truncate", "foreign", "null", "stale", "dtype", "each", "swap"]
"""Faults for negative controls; `statestore.connector.faults` says what each does and which check finds it."""


STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Of every configuration: no field that nobody reads, and no time or share that is infinite or no number."""


_HOST = re.compile(r"[^\s/\[\]]+")
"""A host's name, an address, or an IPv6 address without its brackets."""


def _check_address(value: str) -> None:
    """Raises ValueError unless `value` is host:port."""
    host, _, port = value.rpartition(":")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not bare or not _HOST.fullmatch(bare) or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{value!r} is not host:port; write it without a scheme and a path")


def _address_or_empty(value: str) -> str:
    """For fields that may be left empty."""
    if value:
        _check_address(value)
    return value


EXACT_DRAFTS = ("ngram", "mtp")
"""Drafts with which the CPU engine gives the tokens that it gives without (docs/replay_ssm.md)."""


def draft_method(extra_args: Mapping[str, object]) -> str:
    """The method of `speculative_config` among vLLM engine arguments; "" without drafts."""
    drafts = extra_args.get("speculative_config")
    if not drafts:
        return ""
    method = drafts.get("method") if isinstance(drafts, Mapping) else None
    return method if isinstance(method, str) and method else "unnamed"


class EtcdConfig(BaseModel):
    """Where etcd is and how to speak to it."""

    model_config = STRICT

    endpoints: list[str] = Field(["127.0.0.1:2379"], description="host:port of every etcd member")
    prefix: str = Field("/deltaserve/default", description="key prefix; one a cluster")
    user: str = Field("", description="user name, where etcd authenticates")
    password: str = Field("", description="password of that user", repr=False)
    ca_cert: Path | None = Field(None, description="PEM file of the authority; switches TLS on")
    client_cert: Path | None = Field(None, description="PEM file of the client's certificate (mutual TLS)")
    client_key: Path | None = Field(None, description="PEM file of the client's key (mutual TLS)")
    lease_ttl: int = Field(5, ge=2, description="seconds after which a silent member is gone")
    timeout: float = Field(3.0, gt=0, description="seconds one etcd call may take")

    @field_validator("endpoints")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("empty; name at least one host:port")
        for endpoint in value:
            _check_address(endpoint)
        return value

    @model_validator(mode="after")
    def _certificates_fit(self) -> Self:
        if self.ca_cert is None and (self.client_cert is not None or self.client_key is not None):
            raise ValueError("client_cert and client_key need ca_cert; name the authority's PEM file")
        if (self.client_cert is None) != (self.client_key is None):
            missing = "client_key" if self.client_key is None else "client_cert"
            raise ValueError(f"mutual TLS needs client_cert and client_key; {missing} is missing")
        return self


class StoreConfig(BaseModel):
    """The Mooncake store, as one worker's client sees it."""

    model_config = STRICT

    master: str = Field(
        "127.0.0.1:50051",
        description="host:port of the Mooncake master; of several, the etcd that elects them: etcd://host:port;...",
    )
    metadata: str = Field("P2PHANDSHAKE", description="Mooncake's metadata server, or P2PHANDSHAKE for none")
    hostname: str = Field(
        "127.0.0.1", description="address under which other clients reach this one's segment"
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake's transport")
    rdma_devices: str = Field("", description="comma-separated RDMA devices (protocol rdma)")
    segment_bytes: int = Field(
        512 << 20, gt=0, description="bytes this worker lends to the store, over all its ranks"
    )
    timeout: float = Field(
        10.0, gt=0, description="seconds one store call may take before it counts as failed"
    )

    @field_validator("master")
    @classmethod
    def _is_address(cls, value: str) -> str:
        scheme, separator, rest = value.rpartition("://")
        if not separator:
            _check_address(value)
        elif scheme != "etcd":
            raise ValueError(
                f"{value!r} is not host:port; with several masters write etcd://host:port;host:port"
            )
        else:
            for member in re.split("[,;]", rest):
                _check_address(member)
        return value


class LogConfig(BaseModel):
    """What a process logs, on stderr."""

    model_config = STRICT

    format: Literal["text", "json"] = Field(
        "text", description="text, or json: one object a line, with the request's id (docs/observe.md)"
    )
    level: Literal["debug", "info", "warning"] = Field(
        "info", description="least level that is logged; debug: lines for every request"
    )


class TraceConfig(BaseModel):
    """OpenTelemetry traces; off without an endpoint."""

    model_config = STRICT

    endpoint: str = Field(
        "", description="OTLP/gRPC collector, http://host:port or https://host:port; empty: no traces"
    )
    ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of traces that are kept, of those that no client has decided about",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(
                f"{value!r} is no URL; give http://host:port or https://host:port, or leave it empty"
            )
        return value


class TlsConfig(BaseModel):
    """One end of mutual TLS: all three files, or none for a connection in the clear."""

    model_config = STRICT

    ca_cert: Path | None = Field(None, description="PEM file of the authority that signed the other side")
    cert: Path | None = Field(None, description="PEM file of this process's certificate")
    key: Path | None = Field(None, description="PEM file of this process's key")

    @property
    def on(self) -> bool:
        """Whether the connection is encrypted and both sides are authenticated."""
        return self.ca_cert is not None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        given = {name: getattr(self, name) is not None for name in ("ca_cert", "cert", "key")}
        if any(given.values()) and not all(given.values()):
            missing = " and ".join(name for name, there in given.items() if not there)
            raise ValueError(f"mutual TLS needs ca_cert, cert and key; {missing} is missing")
        return self


class WorkerTlsConfig(TlsConfig):
    """The router's end of mutual TLS to the workers."""

    server_name: str = Field(
        "", description="name that every worker's certificate carries; empty: the host of its address"
    )


def longest_put(load_timeout: float, store_timeout: float) -> float:
    """Seconds from taking room in the store to the end of a write there: a publish is given up after four load
    timeouts, and what it is doing then may take one more and a few store calls. Ranks write no later than that."""
    return 5 * load_timeout + 3 * store_timeout


class WorkerConfig(BaseModel):
    """One worker process: a vLLM engine core behind gRPC."""

    model_config = STRICT

    role: Role = Field("decode", description="what this worker does")
    model: Path = Field(Path("models/demo"), description="folder of the model")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(0, ge=0, le=65535, description="port to bind; 0: any free one")
    advertise: str = Field(
        "", description="host:port that the router shall use; empty: host and the bound port"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="what the engine runs on")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU, the model's own on CUDA"
    )
    kv_cache_dtype: CacheDtype = Field(
        "auto", description="dtype of attention's cached rows; auto: the model's, fp8: half of it (CUDA only)"
    )
    tp: int = Field(1, ge=1, description="tensor-parallel size; divides the model's heads")
    dcp: int = Field(1, ge=1, description="decode context parallel size; divides tp (decode only)")
    dcp_interleave: int = Field(
        1, ge=1, description="tokens in a row on one DCP rank; divides the block size"
    )
    max_model_len: int = Field(16384, ge=2, description="longest prompt plus answer, tokens")
    max_num_seqs: int = Field(8, ge=1, description="requests that run at once")
    max_num_batched_tokens: int = Field(2048, ge=16, description="tokens of one engine step")
    kv_cache_bytes: int = Field(1 << 30, gt=0, description="bytes of the KV and state cache, a rank")
    prefix_match_unit: int = Field(16, ge=1, description="tokens; prefixes match in multiples of it")
    omp_threads: str = Field("", description="CPU cores a rank, vLLM's notation, e.g. 0|1; empty: all cores")
    verify: bool = Field(True, description="check every shard before use; off only for negative controls")
    damage: Damage = Field("none", description="fault injected before a load (negative controls)")
    extra_args: dict[str, object] = Field(
        default_factory=dict, description="further vLLM engine arguments, as JSON"
    )
    load_timeout: float = Field(30.0, gt=0, description="seconds a boundary may take to load")
    checkpoint_tokens: int = Field(
        512,
        ge=0,
        description="least distance of two checkpoints that a prefill leaves in the store, tokens; 0: it leaves none",
    )
    checkpoint_min_tokens: int = Field(
        128,
        ge=1,
        description="shortest prompt and answer whose end a decode worker keeps in the store, tokens",
    )
    checkpoint_bytes: int | None = Field(
        None,
        ge=0,
        description="bytes of checkpoints this worker keeps in the store; empty: half of store_segment_bytes; "
        "0: it keeps none",
    )
    drain_seconds: float = Field(
        25.0, ge=0, description="seconds a worker that was told to go has to finish what it holds"
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="port of /metrics for Prometheus, at host; 0: none"
    )
    reasoning_parser: str = Field(
        "",
        description="vLLM's parser of the model's reasoning, the router's too: grammars begin where it ends",
    )
    tls: TlsConfig = Field(default_factory=lambda: TlsConfig())
    log: LogConfig = Field(default_factory=lambda: LogConfig())
    trace: TraceConfig = Field(default_factory=lambda: TraceConfig())
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())
    store: StoreConfig = Field(default_factory=lambda: StoreConfig())

    @model_validator(mode="after")
    def _device_reads_the_cache(self) -> Self:
        if self.device == "cpu" and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype: the CPU's attention reads rows of the model's dtype, not {self.kv_cache_dtype}; "
                "leave it at auto, or use device cuda"
            )
        return self

    @property
    def checkpoint_limit(self) -> int:
        """Bytes of checkpoints that this worker keeps."""
        if self.checkpoint_bytes is None:
            return self.store.segment_bytes // 2
        return self.checkpoint_bytes

    @property
    def longest_put(self) -> float:
        """Seconds from taking room in the store to the end of a write there."""
        return longest_put(self.load_timeout, self.store.timeout)

    _is_address = field_validator("advertise")(_address_or_empty)

    @model_validator(mode="after")
    def _dcp_fits(self) -> Self:
        if self.tp % self.dcp:
            raise ValueError(f"dcp {self.dcp} does not divide tp {self.tp}; choose a divisor of tp")
        if self.dcp > 1 and self.role == "prefill":
            raise ValueError(
                f"dcp {self.dcp}: decode context parallelism is for the decode role; leave it at 1"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_exact(self) -> Self:
        if self.device == "cuda" and self.dcp > 1 and self.extra_args.get("dcp_comm_backend") == "ag_rs":
            # Seen with vllm 0.33.0 on two H200, with and without this project's connector (docs/gpu.md).
            raise ValueError(
                "extra_args.dcp_comm_backend: with ag_rs vLLM gives other tokens from the first decode step on; leave "
                "it out, a2a is used then"
            )
        method = draft_method(self.extra_args)
        if self.device == "cuda" or not method:
            return self
        if method not in EXACT_DRAFTS:
            raise ValueError(
                f"extra_args.speculative_config: on the CPU, answers with {method} drafts have not been shown to be "
                f"those without; use {' or '.join(EXACT_DRAFTS)}, leave it out, or use device cuda"
            )
        if self.dcp > 1:
            raise ValueError(
                f"extra_args.speculative_config: on the CPU not with dcp {self.dcp}; leave one of the two out"
            )
        return self


class RouterConfig(BaseModel):
    """The router: the OpenAI endpoint, and the dispatcher behind it."""

    model_config = STRICT

    model: Path = Field(
        Path("models/demo"), description="folder of the model: tokenizer and configuration only"
    )
    served_model_name: str = Field("", description="name clients use; empty: the model folder's name")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0: any free one")
    max_model_len: int = Field(16384, ge=2, description="longest prompt plus answer, tokens")
    processes: int = Field(
        1, ge=1, le=64, description="router processes that share the port, one core each (docs/router.md)"
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body; longer ones get 413")
    placement: Literal["auto", "handover", "local"] = Field(
        "auto",
        description="auto: hand over prompts of handover_min_tokens and more; handover: whenever possible; "
        "local: never",
    )
    handover_min_tokens: int = Field(
        256, ge=2, description="shortest prompt that is handed over under placement auto"
    )
    api_keys: Path | None = Field(
        None,
        description="JSON file of API keys and their limits (docs/overload.md); empty: everybody may enter",
    )
    slots_per_seq: float = Field(
        1.5, gt=0, description="requests let in for each that the decode workers can run at once; others wait"
    )
    max_queued: int = Field(1024, ge=0, description="requests that may wait to be let in; more get 429")
    ttft_slo: float = Field(
        0.0, ge=0, description="seconds to the first token; what cannot meet it gets 429 at once; 0: no limit"
    )
    policy: Literal["least", "prefix", "price"] = Field(
        "least", description="how workers are chosen, and which prompts are handed over under placement auto"
    )
    early_reads: bool = Field(
        False, description="decode workers read a boundary beside its commit (docs/early_reads.md)"
    )
    prefill_timeout: float = Field(
        120.0, gt=0, description="seconds a prefill may take before the prompt goes to a decode worker"
    )
    request_timeout: float = Field(600.0, gt=0, description="seconds a whole request may take")
    worker_wait: float = Field(
        2.0, ge=0, description="seconds a request waits for a decode worker to appear before 503"
    )
    resume_wait: float = Field(
        60.0, ge=0, description="seconds a stream that has begun waits for a decode worker to go on"
    )
    first_token_timeout: float = Field(
        300.0,
        gt=0,
        description="seconds a decode worker has for a request's first token before another one is tried",
    )
    token_timeout: float = Field(
        60.0, gt=0, description="seconds between two tokens before another decode worker goes on"
    )
    log: LogConfig = Field(default_factory=lambda: LogConfig())
    trace: TraceConfig = Field(default_factory=lambda: TraceConfig())
    tool_parser: str = Field(
        "",
        description="vLLM's parser of the model's tool calls; with one, clients may leave the choice to the model",
    )
    reasoning_parser: str = Field(
        "", description="vLLM's parser of the model's reasoning; workers need the same"
    )
    chat_template: Path | None = Field(
        None, description="Jinja file of the chat template; empty: the model folder's own"
    )
    front: Literal["python", "rust"] = Field(
        "python",
        description="python: vLLM's own application answers all; rust: vLLM's Rust front end answers plain completions "
        "and chats, and that application the rest (docs/router.md)",
    )
    rust_binary: Path | None = Field(
        None,
        description="program of the Rust front end, vllm-rs; empty: the one that the CUDA wheel has brought",
    )
    rust_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port on which the Rust front end answers by itself, without keys and limits; 0: none",
    )
    grpc_port: int = Field(
        -1, ge=-1, le=65535, description="port of the gRPC API for clients; 0: any free one; -1: none"
    )
    client_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds a client may take to send a request's head, to send its body, or to read what waits for "
        "it",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the endpoint's certificate, with its chain; switches HTTPS on"
    )
    tls_key: Path | None = Field(None, description="PEM file of the endpoint's key")
    worker_tls: WorkerTlsConfig = Field(default_factory=lambda: WorkerTlsConfig())
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())

    @model_validator(mode="after")
    def _key_and_certificate(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"HTTPS needs tls_cert and tls_key; {missing} is missing")
        return self

    @model_validator(mode="after")
    def _rust_port_is_open_to_all(self) -> Self:
        if self.rust_port and self.front != "rust":
            raise ValueError(
                f"rust_port {self.rust_port}: only for front rust; leave it out or set front to rust"
            )
        if self.rust_port and (self.api_keys is not None or self.tls_cert is not None):
            raise ValueError(
                f"rust_port {self.rust_port}: the Rust front end would answer there without API keys and TLS; leave "
                "rust_port out, or api_keys and tls_cert"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients give as `model`."""
        return self.served_model_name or self.model.resolve().name


class ClusterConfig(BaseModel):
    """A whole cluster on one machine: what `deltaserve up` starts."""

    model_config = STRICT

    model: Path = Field(Path("models/demo"), description="folder of the model")
    served_model_name: str = Field("", description="name clients use; empty: the model folder's name")
    prefill: int = Field(1, ge=0, description="prefill workers; 0: decode workers prefill by themselves")
    decode: int = Field(1, ge=1, description="decode workers")
    prefill_tp: int = Field(1, ge=1, description="tensor-parallel size of each prefill worker")
    decode_tp: int = Field(1, ge=1, description="tensor-parallel size of each decode worker")
    decode_dcp: int = Field(1, ge=1, description="decode context parallel size; divides decode_tp")
    host: str = Field("127.0.0.1", description="address the endpoint binds; all else stays on loopback")
    port: int = Field(8000, ge=0, le=65535, description="port of the endpoint; 0: any free one")
    device: Literal["cpu", "cuda"] = Field("cpu", description="what the engines run on")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU, the model's own on CUDA"
    )
    kv_cache_dtype: CacheDtype = Field(
        "auto", description="dtype of attention's cached rows; auto: the model's, fp8: half of it (CUDA only)"
    )
    max_model_len: int = Field(16384, ge=2, description="longest prompt plus answer, tokens")
    max_num_seqs: int = Field(8, ge=1, description="requests that one worker runs at once")
    max_num_batched_tokens: int = Field(2048, ge=16, description="tokens of one engine step")
    kv_cache_bytes: int = Field(1 << 30, gt=0, description="bytes of the KV and state cache, a rank")
    segment_bytes: int = Field(512 << 20, gt=0, description="bytes each worker lends to the store")
    omp_threads: str = Field(
        "",
        description="CPU cores of each worker's ranks, vLLM's notation, e.g. 0|1; empty: all cores, split over the "
        "ranks of one worker and shared by the workers",
    )
    placement: Literal["auto", "handover", "local"] = Field(
        "auto", description="which prompts are handed over; see the router's option of that name"
    )
    handover_min_tokens: int = Field(
        256, ge=2, description="shortest prompt that is handed over under placement auto"
    )
    verify: bool = Field(True, description="check every shard before use; off only for negative controls")
    damage: Damage = Field(
        "none", description="fault that decode workers inject before a load (negative controls)"
    )
    tool_parser: str = Field("", description="vLLM's parser of the model's tool calls")
    reasoning_parser: str = Field("", description="vLLM's parser of the model's reasoning")
    router_processes: int = Field(
        1, ge=1, le=64, description="router processes that share the endpoint's port, one core each"
    )
    prefill_options: dict[str, object] = Field(
        default_factory=dict, description="further fields of the prefill workers' configuration, as JSON"
    )
    decode_options: dict[str, object] = Field(
        default_factory=dict, description="further fields of the decode workers' configuration, as JSON"
    )
    router_options: dict[str, object] = Field(
        default_factory=dict, description="further fields of the router's configuration, as JSON"
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="/metrics of the first worker, the others' ports follow; 0: none (the router's is at its endpoint)",
    )
    log: LogConfig = Field(default_factory=lambda: LogConfig())
    trace: TraceConfig = Field(default_factory=lambda: TraceConfig())
    run_dir: Path | None = Field(
        None, description="folder for the log files; empty: .deltaserve/run/<time> in the working directory"
    )
    lease_ttl: int | None = Field(
        None,
        ge=2,
        description="seconds after which a silent worker is gone; empty: 5, or 60 where tensor-parallel ranks "
        "outnumber the cores",
    )
    start_timeout: float = Field(300.0, gt=0, description="seconds until every process must be ready")
    stop_timeout: float = Field(
        6.0, gt=0, le=8, description="seconds processes have to end before they are killed"
    )
    max_restarts: int = Field(5, ge=0, description="restarts in a row of one process before it is given up")
    etcd_binary: str = Field(
        "", description="etcd to run; empty: the one on PATH or installed by make install"
    )
    master_binary: str = Field(
        "", description="mooncake_master to run; empty: the one beside Python or on PATH"
    )

    @model_validator(mode="after")
    def _dcp_fits(self) -> Self:
        if self.decode_tp % self.decode_dcp:
            raise ValueError(
                f"decode_dcp {self.decode_dcp} does not divide decode_tp {self.decode_tp}; choose a divisor of it"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients give as `model`."""
        return self.served_model_name or self.model.resolve().name

    @property
    def drafts(self) -> dict[str, Any]:
        """The decode workers' `speculative_config`; empty without drafts."""
        found = _extra_args(self.decode_options).get("speculative_config")
        return dict(found) if isinstance(found, Mapping) else {}

    def worker_options(self, role: str) -> dict[str, object]:
        """Further fields of the workers of a role, "prefill" or "decode".

        Drafts of a model have a layer of their own, whose cache is handed over like the others: unless told otherwise,
        prefill workers run that layer too. Drafts of n-grams have none.
        """
        if role == "decode":
            return self.decode_options
        extra = _extra_args(self.prefill_options)
        if "speculative_config" in extra or draft_method(_extra_args(self.decode_options)) in ("", "ngram"):
            return self.prefill_options
        return {**self.prefill_options, "extra_args": {**extra, "speculative_config": self.drafts}}


def _extra_args(options: Mapping[str, object]) -> dict[str, object]:
    extra = options.get("extra_args")
    return dict(extra) if isinstance(extra, Mapping) else {}


class VerifyConfig(ClusterConfig):
    """`deltaserve verify`: the cluster's answers against one aggregated engine with the same weights.

    The inherited fields describe the cluster that is started, and the engine it is compared with.
    """

    port: int = Field(0, ge=0, le=65535, description="port of the started endpoint; 0: any free one")
    endpoint: str = Field(
        "", description="URL of a running cluster; empty: start one, and stop it at the end"
    )
    lengths: list[int] = Field(
        [1, 2, 3, 4, 15, 16, 17, 127, 128, 129, 500, 1000, 3000], description="prompt lengths, tokens"
    )
    concurrency: int = Field(8, ge=1, description="prompts of the run that sends several at once")
    max_tokens: int = Field(16, ge=1, description="tokens generated for each prompt")
    tolerance: float = Field(1e-3, gt=0, description="largest difference of a chosen token's log-prob, nats")
    placements: list[Literal["handover", "auto"]] = Field(
        ["handover", "auto"],
        description="placements to run under; handover also claims how many tokens come from the store",
    )
    damage: Damage = Field(
        "none",
        description="negative control; flip, truncate, foreign, null, stale, dtype, or each of them in turn: "
        "damage every request's state before its load, all must be found; swap: exchange shards with "
        "verification off, answers must differ",
    )
    layouts: list[str] = Field(
        [],
        description="verify several layouts in turn: prefill TP-decode TP-decode DCP as in 2-1-1, or all with at "
        "most two ranks a role; empty: the one that --prefill-tp, --decode-tp and --decode-dcp give",
    )
    quick: bool = Field(False, description="few lengths, greedy only: a check of minutes, not of all")
    json_file: Path | None = Field(
        None, description="file that gets the result as JSON", json_schema_extra={"flag": "--json"}
    )

    def cluster(self, **changes: object) -> ClusterConfig:
        """The configuration of the cluster to start: the inherited fields, with `changes` laid over them."""
        own = {name: getattr(self, name) for name in ClusterConfig.model_fields}
        return ClusterConfig.model_validate({**own, **changes})


class DoctorConfig(WorkerConfig):
    """`deltaserve doctor`: what this machine has, and what a worker of this configuration would use.

    The inherited fields are those of the worker; `role` picks which one.
    """

    endpoint: str = Field(
        "", description="host:port of a running worker to ask, instead of building its configuration"
    )
    json_file: Path | None = Field(
        None, description="file that gets the report as JSON", json_schema_extra={"flag": "--json"}
    )

    _is_worker = field_validator("endpoint")(_address_or_empty)


class BoundariesConfig(BaseModel):
    """`deltaserve boundaries`: what the ledger holds."""

    model_config = STRICT

    json_output: bool = Field(
        False, description="print one JSON document", json_schema_extra={"flag": "--json"}
    )
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())


class DrainConfig(BaseModel):
    """`deltaserve drain`: a worker finishes what it holds, and leaves."""

    model_config = STRICT

    worker: str = Field(
        min_length=1,
        description="the worker: its id, an unambiguous beginning of it, or its address",
        json_schema_extra={"positional": True},
    )
    seconds: float | None = Field(
        None,
        ge=0,
        description="seconds it has to finish what it holds, the rest goes on elsewhere; empty: its own limit",
    )
    wait: float = Field(600.0, gt=0, description="seconds after which this command gives up")
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())


class TopConfig(BaseModel):
    """`deltaserve top`: what a running router sees, drawn anew once a second."""

    model_config = STRICT

    endpoint: str = Field("http://127.0.0.1:8000", description="URL of the router")
    api_key: str = Field("", description="API key, where the router has any", repr=False)
    interval: float = Field(1.0, gt=0, description="seconds between two looks")
    once: bool = Field(False, description="print one picture and end")
    width: int = Field(0, ge=0, description="columns; 0: the terminal's")
