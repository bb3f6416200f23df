# SPDX-License-Identifier: Apache-2.0
"""Configuration of every role: one typed model each; flags, environment and file give the same fields.

`deltaserve router --port 8000`, `DELTASERVE_ROUTER_PORT=8000` and `port: 8000` in a JSON file under "router" mean the
same. `deltaserve.cli.options` makes the flags out of these models, so a field exists once. Every address is loopback
unless somebody says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["prefill", "decode"]
"""What a worker does: `prefill` computes N-1 prompt tokens and publishes; `decode` restores and generates."""


class EtcdConfig(BaseModel):
    """Where etcd is and how to speak to it."""

    model_config = ConfigDict(extra="forbid")

    endpoints: list[str] = Field(["127.0.0.1:2379"], description="host:port of every etcd member")
    prefix: str = Field("/deltaserve/default", description="key prefix; one a cluster")
    user: str = Field("", description="user name, where etcd authenticates")
    password: str = Field("", description="password of that user", repr=False)
    ca_cert: Path | None = Field(None, description="PEM file of the authority; switches TLS on")
    client_cert: Path | None = Field(None, description="PEM file of the client's certificate (mutual TLS)")
    client_key: Path | None = Field(None, description="PEM file of the client's key (mutual TLS)")
    lease_ttl: int = Field(5, ge=2, description="seconds after which a silent member is gone")
    timeout: float = Field(3.0, gt=0, description="seconds one etcd call may take")


class StoreConfig(BaseModel):
    """The Mooncake store, as one worker's client sees it."""

    model_config = ConfigDict(extra="forbid")

    master: str = Field("127.0.0.1:50051", description="host:port of the Mooncake master")
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


class WorkerConfig(BaseModel):
    """One worker process: a vLLM engine core behind gRPC."""

    model_config = ConfigDict(extra="forbid")

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
    tp: int = Field(1, ge=1, description="tensor-parallel size; divides the model's heads")
    dcp: int = Field(1, ge=1, description="decode context parallel size; divides tp (decode only)")
    dcp_interleave: int = Field(
        1, ge=1, description="tokens in a row on one DCP rank; divides the block size"
    )
    max_model_len: int = Field(16384, ge=2, description="longest prompt plus answer, tokens")
    max_num_seqs: int = Field(8, ge=1, description="requests that run at once")
    max_num_batched_tokens: int = Field(2048, ge=16, description="tokens of one engine step")
    kv_cache_bytes: int = Field(512 << 20, gt=0, description="bytes of the KV and state cache, a rank")
    prefix_match_unit: int = Field(16, ge=1, description="tokens; prefixes match in multiples of it")
    omp_threads: str = Field("", description="CPU cores a rank, vLLM's notation, e.g. 0|1; empty: all cores")
    verify: bool = Field(True, description="check every shard before use; off only for negative controls")
    damage: Literal["none", "flip", "swap"] = Field(
        "none", description="fault injected before a load (negative controls)"
    )
    extra_args: dict[str, object] = Field(
        default_factory=dict, description="further vLLM engine arguments, as JSON"
    )
    load_timeout: float = Field(30.0, gt=0, description="seconds a boundary may take to load")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0: none")
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())
    store: StoreConfig = Field(default_factory=lambda: StoreConfig())


class RouterConfig(BaseModel):
    """The router: the OpenAI endpoint, and the dispatcher behind it."""

    model_config = ConfigDict(extra="forbid")

    model: Path = Field(
        Path("models/demo"), description="folder of the model: tokenizer and configuration only"
    )
    served_model_name: str = Field("", description="name clients use; empty: the model folder's name")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0: any free one")
    max_model_len: int = Field(16384, ge=2, description="longest prompt plus answer, tokens")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body; longer ones get 413")
    placement: Literal["auto", "handover", "local"] = Field(
        "auto",
        description="auto: hand over prompts of handover_min_tokens and more; handover: whenever possible; local: never",
    )
    handover_min_tokens: int = Field(
        256, ge=2, description="shortest prompt that is handed over under placement auto"
    )
    prefill_timeout: float = Field(
        120.0, gt=0, description="seconds a prefill may take before the prompt goes to a decode worker"
    )
    request_timeout: float = Field(600.0, gt=0, description="seconds a whole request may take")
    worker_wait: float = Field(
        2.0, ge=0, description="seconds a request waits for a decode worker to appear before 503"
    )
    etcd: EtcdConfig = Field(default_factory=lambda: EtcdConfig())
