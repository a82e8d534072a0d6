{{- define "agl.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains "agl" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-agl" (.Release.Name | trunc 36 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{- /* What finds the Pods of a component: (list $ "gateway"). Never changes. */ -}}
{{- define "agl.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: agl
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* Not of Pods: the controller finds the Pods of rollouts by managed-by. */ -}}
{{- define "agl.labels" -}}
{{- $root := index . 0 -}}
{{ include "agl.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "agl.keySecret" -}}
{{ .Values.serverKey.existingSecret | default (printf "%s-server-key" (include "agl.fullname" .)) }}
{{- end -}}

{{- define "agl.claim" -}}
{{ .Values.gateway.persistence.existingClaim | default (printf "%s-gateway" (include "agl.fullname" .)) }}
{{- end -}}

{{- define "agl.budgetApi" -}}
{{ .Capabilities.APIVersions.Has "policy/v1" | ternary "policy/v1" "policy/v1beta1" }}
{{- end -}}

{{- /* What the Pods of both components have in common. */ -}}
{{- define "agl.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "agl.placement" -}}
{{- $component := index . 1 -}}
{{- $values := index (index . 0).Values $component -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "agl.selector" . | nindent 8 }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "agl.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "agl.environment" -}}
- name: AGL_SERVER_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "agl.keySecret" . }}
      key: key
- name: AGL_LOG
  value: {{ .Values.log.filter | quote }}
- name: AGL_LOG_FORMAT
  value: {{ .Values.log.format | quote }}
{{- end -}}
