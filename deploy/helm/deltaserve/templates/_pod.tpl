{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{/*
Argument: root. What every pod of this release has in its spec. Service links are off: Kubernetes would put a variable
DELTASERVE_ROUTER_SERVICE_HOST into every pod beside a Service of that name, and `deltaserve` refuses variables that are
no option of the command.
*/}}
{{- define "deltaserve.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "deltaserve.fullname" . }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.podSecurity.runAsUser }}
  runAsGroup: {{ .Values.podSecurity.runAsGroup }}
  fsGroup: {{ .Values.podSecurity.runAsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* No capability for RDMA either: for a user that is not root it would have no effect (docs/helm.md). */}}
{{- define "deltaserve.container.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Argument: something with nodeSelector, tolerations, affinity and the like. */}}
{{- define "deltaserve.scheduling" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" -}}
{{- with get $ $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- range $field := list "priorityClassName" "runtimeClassName" -}}
{{- with get $ $field }}
{{ $field }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Argument: list of root, component. Pods of one component on different nodes where that is possible. */}}
{{- define "deltaserve.spread" -}}
{{- $root := index . 0 -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "deltaserve.instance" $root | nindent 14 }}
              app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Argument: list of root, model. */}}
{{- define "deltaserve.volumes" -}}
{{- $root := index . 0 -}}
{{- $model := index . 1 -}}
- name: tmp
  emptyDir: {}
{{- with $model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.etcd.tlsSecret }}
- name: etcd-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with $root.Values.tls.workersSecret }}
- name: worker-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Argument: list of root, model. */}}
{{- define "deltaserve.mounts" -}}
{{- $root := index . 0 -}}
{{- $model := index . 1 -}}
- {name: tmp, mountPath: /tmp}
{{- if $model.volume }}
- {name: model, mountPath: {{ $model.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if $root.Values.etcd.tlsSecret }}
- {name: etcd-tls, mountPath: /etc/deltaserve/etcd-tls, readOnly: true}
{{- end }}
{{- if $root.Values.tls.workersSecret }}
- {name: worker-tls, mountPath: /etc/deltaserve/worker-tls, readOnly: true}
{{- end }}
{{- end -}}
