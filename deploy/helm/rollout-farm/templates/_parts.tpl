{{- define "farm.labels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "farm.name" -}}
{{ printf "%s-%s" .root.Release.Name .part | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "farm.key" -}}
valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: {{ .key }}}}
{{- end }}

{{/* Where the farm is, and its keys. `$(PASSWORD)` is filled in by the kubelet. */}}
{{- define "farm.env" -}}
- name: PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.secret }}, key: password, optional: true}}
- name: FARM_STORE_URL
{{- if eq .Values.postgres.kind "statefulset" }}
  value: postgresql://farm:$(PASSWORD)@{{ include "farm.name" (dict "root" . "part" "postgres") }}/farm
{{- else if eq .Values.postgres.kind "cloudnativepg" }}
  # the operator creates this Secret
  valueFrom: {secretKeyRef: {name: {{ include "farm.name" (dict "root" . "part" "postgres") }}-app, key: uri}}
{{- else }}
  {{ include "farm.key" (dict "root" . "key" "store-url") }}
{{- end }}
- name: FARM_BROKER_URL
{{- if eq .Values.redis.kind "redis" }}
  value: redis://:$(PASSWORD)@{{ include "farm.name" (dict "root" . "part" "redis") }}:6379/0
{{- else }}
  {{ include "farm.key" (dict "root" . "key" "broker-url") }}
{{- end }}
- name: FARM_API_KEY
  {{ include "farm.key" (dict "root" . "key" "api-key") }}
- name: FARM_SECRET_KEY
  {{ include "farm.key" (dict "root" . "key" "secret-key") }}
{{- end }}

{{/* The tables are made, or brought up to date, before a process of the farm starts; until Postgres answers it is tried again. */}}
{{- define "farm.migrate" -}}
- name: migrate
  image: {{ .Values.image }}
  args: [migrate]
  env: {{- include "farm.env" . | nindent 4 }}
  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}
