{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "deltaserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 32 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What every pod and object of this release carries. */}}
{{- define "deltaserve.instance" -}}
app.kubernetes.io/name: deltaserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "deltaserve.labels" -}}
{{ include "deltaserve.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Argument: list of root, image name, version. An image reference, the version's settings laid over the common ones. */}}
{{- define "deltaserve.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $version := index . 2 -}}
{{- $over := get (default dict $version.images) $name | default dict -}}
{{- $image := mergeOverwrite (deepCopy (get $root.Values.images $name)) $over -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository $image.tag -}}
{{- end -}}
{{- end -}}

{{/* Argument: list of root, version. The version's model as JSON. */}}
{{- define "deltaserve.model" -}}
{{- $root := index . 0 -}}
{{- $version := index . 1 -}}
{{- mergeOverwrite (deepCopy $root.Values.model) (default dict $version.model) | toJson -}}
{{- end -}}

{{/*
Argument: list of root, version. The part of the cluster's key prefix that belongs to this version: its name, and a hash
of all that decides whether state of one worker means anything to another. A change of any of it in place gives new
workers and routers a prefix of their own, so that they never pair with those that are still running.
*/}}
{{- define "deltaserve.prefix" -}}
{{- $root := index . 0 -}}
{{- $version := index . 1 -}}
{{- $model := include "deltaserve.model" . | fromJson -}}
{{- $parts := list $model.path $model.heads $model.volume -}}
{{- range $pool := $version.pools -}}
{{- $image := include "deltaserve.image" (list $root (include "deltaserve.device" $pool) $version) -}}
{{- $options := default dict $pool.options -}}
{{- $parts = concat $parts (list $pool.role $image (default dict $pool.engineArgs) $options.dtype $options.prefix_match_unit) -}}
{{- end -}}
{{- printf "%s/%s/%s/%s-%s" $root.Values.etcd.prefix $root.Release.Namespace $root.Release.Name $version.name (toJson $parts | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "deltaserve.device" -}}
{{- default "cuda" .device -}}
{{- end -}}

{{- define "deltaserve.router.scheme" -}}
{{- if .Values.tls.routerSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "deltaserve.etcd.scheme" -}}
{{- if .Values.etcd.tlsSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* host:port of every etcd member, separated by commas. */}}
{{- define "deltaserve.etcd.endpoints" -}}
{{- if .Values.etcd.bundled -}}
{{- $name := printf "%s-etcd" (include "deltaserve.fullname" .) -}}
{{- $members := list -}}
{{- range $index := until (int .Values.etcd.replicas) -}}
{{- $members = append $members (printf "%s-%d.%s.%s.svc:2379" $name $index $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $members -}}
{{- else -}}
{{- join "," .Values.etcd.endpoints -}}
{{- end -}}
{{- end -}}

{{/* What masters and their clients find the leading master through; separated by semicolons, Mooncake's notation. */}}
{{- define "deltaserve.master.coordination" -}}
{{- if .Values.master.etcdEndpoints -}}
{{- join ";" .Values.master.etcdEndpoints -}}
{{- else -}}
{{- include "deltaserve.etcd.endpoints" . | replace "," ";" -}}
{{- end -}}
{{- end -}}

{{- define "deltaserve.master.ha" -}}
{{- if gt (int .Values.master.replicas) 1 -}}true{{- end -}}
{{- end -}}

{{/* Name of this release among all that elect masters in the same etcd. */}}
{{- define "deltaserve.master.cluster" -}}
{{- printf "%s-%s" .Release.Namespace .Release.Name -}}
{{- end -}}

{{- define "deltaserve.master.address" -}}
{{- if include "deltaserve.master.ha" . -}}
{{- printf "etcd://%s" (include "deltaserve.master.coordination" .) -}}
{{- else -}}
{{- printf "%s-master.%s.svc:50051" (include "deltaserve.fullname" .) .Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* Argument: version. Not empty when one of its pools follows the planner. */}}
{{- define "deltaserve.planned" -}}
{{- range $pool := .pools -}}
{{- $scaling := default dict $pool.autoscaling -}}
{{- if and $scaling.enabled $scaling.planner -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Argument: list of root, version. */}}
{{- define "deltaserve.planner.name" -}}
{{- printf "%s-%s-planner" (include "deltaserve.fullname" (index . 0)) (index . 1).name -}}
{{- end -}}

{{/* Seconds: no request outlives them. */}}
{{- define "deltaserve.longestRequest" -}}
{{- int .Values.router.requestTimeout -}}
{{- end -}}

{{/* A worker is killed this long after it was told to go: the longest request, and the margin. */}}
{{- define "deltaserve.worker.grace" -}}
{{- add (include "deltaserve.longestRequest" . | int) (int .Values.drain.marginSeconds) -}}
{{- end -}}

{{/* A router waits for proxies to forget it as well. */}}
{{- define "deltaserve.router.grace" -}}
{{- add (include "deltaserve.longestRequest" . | int) (int .Values.drain.propagationSeconds) (int .Values.drain.marginSeconds) -}}
{{- end -}}

{{/* Argument: list of root, components. Peers of a network policy: this release's pods of these components. */}}
{{- define "deltaserve.peers" -}}
- podSelector:
    matchLabels: {{- include "deltaserve.instance" (index . 0) | nindent 6 }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ index . 1 | toJson }}}
{{- end -}}
