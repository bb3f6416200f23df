{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{/* Argument: a dict of fields (snake case) and values. A flag for each, sorted by name, as deltaserve/cli/options.py reads them. */}}
{{- define "deltaserve.options" -}}
{{- range $name := keys . | sortAlpha -}}
{{- $value := get $ $name -}}
{{- $flag := $name | replace "_" "-" -}}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
- {{ ternary (printf "--%s" $flag) (printf "--no-%s" $flag) $value | quote }}
{{- else if or (kindIs "map" $value) (kindIs "slice" $value) }}
- {{ printf "--%s=%s" $flag (toJson $value) | quote }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- {{ printf "--%s=%s" $flag ($value | int64 | toString) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Argument: list of root, version. How a process of this version speaks to etcd. */}}
{{- define "deltaserve.etcd.args" -}}
{{- $root := index . 0 -}}
- {{ printf "--etcd-endpoints=%s" (include "deltaserve.etcd.endpoints" $root) | quote }}
- {{ printf "--etcd-prefix=%s" (include "deltaserve.prefix" .) | quote }}
- --etcd-timeout={{ $root.Values.etcd.timeout }}
- --etcd-lease-ttl={{ $root.Values.etcd.leaseTtl }}
{{- if $root.Values.etcd.tlsSecret }}
- --etcd-ca-cert=/etc/deltaserve/etcd-tls/ca.crt
- --etcd-client-cert=/etc/deltaserve/etcd-tls/tls.crt
- --etcd-client-key=/etc/deltaserve/etcd-tls/tls.key
{{- end }}
{{- end -}}

{{/* Argument: list of root, command. etcd's user and password, under the command's names. */}}
{{- define "deltaserve.etcd.env" -}}
{{- $root := index . 0 -}}
{{- $command := index . 1 | upper -}}
{{- with $root.Values.etcd.auth }}
{{- if .secret }}
- name: DELTASERVE_{{ $command }}_ETCD_USER
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .userKey }}}}
- name: DELTASERVE_{{ $command }}_ETCD_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .passwordKey }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/*
Argument: list of root, version. etcd for the commands that somebody runs inside a pod: `deltaserve boundaries`, and
`deltaserve drain`, which the pod's own hook runs.
*/}}
{{- define "deltaserve.admin.env" -}}
{{- $root := index . 0 -}}
{{- $where := . -}}
{{- range $command := list "boundaries" "drain" }}
{{- $name := upper $command }}
- {name: DELTASERVE_{{ $name }}_ETCD_ENDPOINTS, value: {{ include "deltaserve.etcd.endpoints" $root | quote }}}
- {name: DELTASERVE_{{ $name }}_ETCD_PREFIX, value: {{ include "deltaserve.prefix" $where | quote }}}
- {name: DELTASERVE_{{ $name }}_ETCD_TIMEOUT, value: {{ $root.Values.etcd.timeout | quote }}}
- {name: DELTASERVE_{{ $name }}_ETCD_LEASE_TTL, value: {{ $root.Values.etcd.leaseTtl | quote }}}
{{- if $root.Values.etcd.tlsSecret }}
- {name: DELTASERVE_{{ $name }}_ETCD_CA_CERT, value: /etc/deltaserve/etcd-tls/ca.crt}
- {name: DELTASERVE_{{ $name }}_ETCD_CLIENT_CERT, value: /etc/deltaserve/etcd-tls/tls.crt}
- {name: DELTASERVE_{{ $name }}_ETCD_CLIENT_KEY, value: /etc/deltaserve/etcd-tls/tls.key}
{{- end }}
{{- with include "deltaserve.etcd.env" (list $root $command) | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- end -}}
