# SPDX-License-Identifier: Apache-2.0
"""Write deltaserve/values.schema.json: what Helm lets into the chart.

    python -m deploy.helm.schema

The shape of the values is written down here. The fields under `options` are those of the configuration models, with
their limits, so that the chart knows an option as soon as `deltaserve` does. What one value means for another one's
sake (tp and the model's heads, versions and pools by name) is in templates/validate.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from deltaserve.cli.options import Option, options_of
from deltaserve.config import RouterConfig, WorkerConfig
from deploy.planner.load import Profile

Schema = dict[str, Any]

PATH = Path(__file__).parent / "deltaserve" / "values.schema.json"

WORKER_OWN = frozenset(
    {
        *("role", "model", "host", "port", "advertise", "device", "tp", "dcp", "dcp_interleave"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"),
        *("metrics_port", "drain_seconds", "extra_args", "tls_ca_cert", "tls_cert", "tls_key"),
        *("store_master", "store_hostname", "store_protocol", "store_rdma_devices", "store_segment_bytes"),
        *("verify", "damage"),
    }
)
"""Options of a worker that the chart sets itself, or that are for negative controls only."""
ROUTER_OWN = frozenset(
    {
        *("model", "served_model_name", "host", "port", "max_model_len", "request_timeout", "api_keys"),
        *("tls_cert", "tls_key"),
        *("worker_tls_ca_cert", "worker_tls_cert", "worker_tls_key", "worker_tls_server_name"),
    }
)
LARGEST_TP = 16
"""Up to here the schema itself knows the divisors of tp; beyond, templates/validate.yaml looks."""

TEXT: Schema = {"type": "string"}
NAMED: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": "^[0-9.]+(m|[kMGTPE]i?)?$"}
SHARE: Schema = {"type": ["integer", "string"], "pattern": "^[0-9]+%$"}
ADDRESS: Schema = {"type": "string", "pattern": "^[^:/\\s]+:[0-9]+$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?$"}
ANY_OBJECT: Schema = {"type": "object"}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def whole(least: int, most: int | None = None) -> Schema:
    """An integer with limits."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def array(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def closed(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """An object without other keys."""
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return schema


IMAGE = closed(
    {"repository": NAMED, "tag": TEXT, "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}}
)
IMAGES = closed({"cpu": IMAGE, "cuda": IMAGE, "etcd": IMAGE})
MODEL_FIELDS: Mapping[str, Schema] = {
    "path": TEXT,
    "heads": whole(0),
    "servedName": TEXT,
    "maxLen": whole(2),
    "volume": ANY_OBJECT,
    "mountPath": TEXT,
}
SCHEDULING: Mapping[str, Schema] = {
    "nodeSelector": TEXT_MAP,
    "tolerations": array(ANY_OBJECT),
    "priorityClassName": TEXT,
}
RESOURCES = closed(
    {
        "requests": {"type": "object", "additionalProperties": QUANTITY},
        "limits": {"type": "object", "additionalProperties": QUANTITY},
    }
)
ENV = array({"type": "object", "required": ["name"]})


def option_schema(option: Option) -> Schema:
    """What pydantic says about one field, without what Helm has no use for."""
    annotated: Any = Annotated[option.field.annotation, option.field]
    schema: Schema = TypeAdapter(annotated).json_schema()
    for key in ("default", "title", "format"):
        schema.pop(key, None)
    for part in schema.get("anyOf", []):
        part.pop("format", None)
    return schema


def options_schema(model: type[BaseModel], command: str, own: frozenset[str]) -> Schema:
    """The object `options` of a role: every option that the chart does not set itself. etcd has values of its own."""
    found: dict[str, Schema] = {}
    for option in options_of(model, command):
        name = "_".join(option.path)
        if name not in own and option.path[0] != "etcd":
            found[name] = option_schema(option)
    return closed(dict(sorted(found.items())))


def pool_schema() -> Schema:
    """One worker pool."""
    pool = closed(
        {
            "name": NAME,
            "role": {"enum": ["prefill", "decode"]},
            "replicas": whole(0),
            "device": {"enum": ["cuda", "cpu"]},
            "tp": whole(1),
            "dcp": whole(1),
            "dcpInterleave": whole(1),
            "maxNumSeqs": whole(1),
            "maxNumBatchedTokens": whole(16),
            "kvCacheBytes": whole(1),
            "segmentBytes": whole(1),
            "options": {"$ref": "#/$defs/workerOptions"},
            "engineArgs": ANY_OBJECT,
            "gpuResource": NAMED,
            "resources": RESOURCES,
            "rdma": closed(
                {"resources": {"type": "object", "additionalProperties": QUANTITY}, "devices": TEXT}
            ),
            **SCHEDULING,
            "affinity": ANY_OBJECT,
            "topologySpreadConstraints": array(ANY_OBJECT),
            "runtimeClassName": TEXT,
            "env": ENV,
            "rollout": closed({"maxSurge": SHARE, "maxUnavailable": SHARE}),
            "autoscaling": autoscaling_schema(),
        },
        (
            "name",
            "role",
            "replicas",
            "tp",
            "maxNumSeqs",
            "maxNumBatchedTokens",
            "kvCacheBytes",
            "segmentBytes",
        ),
    )
    prefill: Schema = {
        "if": {"properties": {"role": {"const": "prefill"}}},
        "then": {"properties": {"dcp": {"const": 1}}},
    }
    divisors: list[Schema] = [
        {
            "if": {"properties": {"tp": {"const": tp}}},
            "then": {"properties": {"dcp": {"enum": [n for n in range(1, tp + 1) if tp % n == 0]}}},
        }
        for tp in range(1, LARGEST_TP + 1)
    ]
    pool["allOf"] = [prefill, *divisors]
    return pool


def autoscaling_schema() -> Schema:
    """A HorizontalPodAutoscaler over metrics that the values name."""
    schema = closed(
        {
            "enabled": FLAG,
            "minReplicas": whole(1),
            "maxReplicas": whole(1),
            "planner": FLAG,
            "metrics": array(ANY_OBJECT),
            "behavior": ANY_OBJECT,
        }
    )
    schema["if"] = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    schema["then"] = {
        "required": ["minReplicas", "maxReplicas"],
        "anyOf": [
            {"required": ["planner"], "properties": {"planner": {"const": True}}},
            {"required": ["metrics"], "properties": {"metrics": {"minItems": 1}}},
        ],
    }
    return schema


def planner_schema() -> Schema:
    """The planner, and the profile that it knows workers by."""
    kinds: dict[str, Schema] = {
        field.name: whole(1) if field.name in ("slots", "kv_tokens") else {"type": "number", "minimum": 0}
        for field in fields(Profile)
    }
    return closed(
        {
            "ttft": POSITIVE,
            "tpot": POSITIVE,
            "target": {**POSITIVE, "exclusiveMaximum": 1},
            "interval": POSITIVE,
            "profile": {"anyOf": [closed({}), closed(kinds, tuple(kinds))]},
            "port": whole(1, 65535),
            "resources": RESOURCES,
            **SCHEDULING,
        }
    )


def version_schema() -> Schema:
    """One version: routers and pools that only see each other."""
    return closed(
        {
            "name": NAME,
            "weight": whole(0, 1_000_000),
            "images": IMAGES,
            "model": closed(MODEL_FIELDS),
            "router": closed({"replicas": whole(0)}, ("replicas",)),
            "pools": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/pool"}},
        },
        ("name", "router", "pools"),
    )


def router_schema() -> Schema:
    """What all routers have in common."""
    return closed(
        {
            "serve": NAMED,
            "requestTimeout": whole(1),
            "port": whole(1, 65535),
            "resources": RESOURCES,
            "options": {"$ref": "#/$defs/routerOptions"},
            "env": ENV,
            **SCHEDULING,
            "affinity": ANY_OBJECT,
            "podAnnotations": TEXT_MAP,
            "apiKeys": closed({"secret": TEXT, "key": NAMED}),
            "service": closed(
                {"type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, "annotations": TEXT_MAP}
            ),
            "ingress": closed(
                {"enabled": FLAG, "className": TEXT, "host": TEXT, "tlsSecret": TEXT, "annotations": TEXT_MAP}
            ),
            "httpRoute": closed(
                {"enabled": FLAG, "parentRefs": array(ANY_OBJECT), "hostnames": array(NAMED)}
            ),
        }
    )


def etcd_schema() -> Schema:
    """The bundled etcd, or the one that exists."""
    return closed(
        {
            "bundled": FLAG,
            "endpoints": array(ADDRESS),
            "prefix": {"type": "string", "pattern": "^(/[A-Za-z0-9._-]+)+$"},
            "leaseTtl": whole(2),
            "timeout": {"type": "number", "exclusiveMinimum": 0},
            "tlsSecret": TEXT,
            "serverTlsSecret": TEXT,
            "auth": closed({"secret": TEXT, "userKey": NAMED, "passwordKey": NAMED}),
            "replicas": {"enum": [1, 3, 5]},
            "storage": closed({"size": QUANTITY, "className": TEXT, "ephemeral": FLAG}),
            "quotaBytes": whole(1 << 26),
            "resources": RESOURCES,
            **SCHEDULING,
        }
    )


def master_schema() -> Schema:
    """Mooncake's masters."""
    return closed(
        {
            "replicas": whole(1, 5),
            "etcdEndpoints": array(ADDRESS),
            "clientTtl": whole(1),
            "kvLeaseTtlMs": whole(1),
            "putReleaseSeconds": whole(31),
            "resources": RESOURCES,
            **SCHEDULING,
        }
    )


def values_schema() -> Schema:
    """The whole schema."""
    root = closed(
        {
            "nameOverride": TEXT,
            "fullnameOverride": TEXT,
            "images": closed(
                {
                    **IMAGES["properties"],
                    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                    "pullSecrets": array(NAMED),
                }
            ),
            "model": closed(MODEL_FIELDS),
            "drain": closed({"marginSeconds": whole(10), "propagationSeconds": whole(0)}),
            "router": router_schema(),
            "tls": closed({"routerSecret": TEXT, "workersSecret": TEXT, "workersName": NAMED}),
            "worker": closed(
                {
                    "grpcPort": whole(1, 65535),
                    "metricsPort": whole(1, 65535),
                    "startSeconds": whole(10, 1800),
                    "shmSize": QUANTITY,
                    "cacheSize": QUANTITY,
                    "podAnnotations": TEXT_MAP,
                }
            ),
            "versions": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/version"}},
            "planner": planner_schema(),
            "etcd": etcd_schema(),
            "master": master_schema(),
            "networkPolicy": closed(
                {
                    "enabled": FLAG,
                    "egress": FLAG,
                    **dict.fromkeys(("clients", "monitoring", "extraEgress"), array(ANY_OBJECT)),
                }
            ),
            "monitoring": closed(
                {
                    "serviceMonitors": FLAG,
                    "rules": FLAG,
                    "dashboards": FLAG,
                    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                    "labels": TEXT_MAP,
                    "dashboardLabels": TEXT_MAP,
                }
            ),
            "podDisruptionBudgets": FLAG,
            "podSecurity": closed({"runAsUser": whole(1), "runAsGroup": whole(1)}),
            "global": ANY_OBJECT,  # Helm adds it
        },
        ("versions",),
    )
    has_model: Schema = {
        "required": ["path", "heads"],
        "properties": {"path": {"minLength": 1}, "heads": {"minimum": 1}},
    }
    root["anyOf"] = [
        {"properties": {"model": has_model}},
        {"properties": {"versions": {"items": {"required": ["model"], "properties": {"model": has_model}}}}},
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the deltaserve chart",
        **root,
        "$defs": {
            "version": version_schema(),
            "pool": pool_schema(),
            "routerOptions": options_schema(RouterConfig, "router", ROUTER_OWN),
            "workerOptions": options_schema(WorkerConfig, "decode", WORKER_OWN),
        },
    }


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(values_schema(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
