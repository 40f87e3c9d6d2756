{{- define "tilecast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name, with the chart's unless it says so already; 63 characters are what a label may hold. */}}
{{- define "tilecast.fullname" -}}
{{- $name := include "tilecast.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tilecast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tilecast.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tilecast.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "tilecast.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: tilecast
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* When jobs are let go: before an uninstall, or before an upgrade by which the release that runs answers no job of
another kind any more; that upgrade may fail, and an uninstall follow. Empty where none can wait, or that is left to the user. */}}
{{- define "tilecast.releaseAt" -}}
{{- if and .Values.jobs.releaseOnUninstall .Values.jobs.enabled -}}
pre-delete
{{- else if and .Values.jobs.releaseOnUninstall .Release.IsUpgrade -}}
{{- $running := lookup "apps/v1" "Deployment" .Release.Namespace (include "tilecast.fullname" .) -}}
{{- range dig "spec" "template" "spec" "containers" (list) $running -}}
{{- range .env -}}
{{- if and (eq .name "TILECAST_JOBS") (eq (toString .value) "true") -}}
pre-upgrade,pre-delete
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of what runs before an uninstall; not those that the Service selects. */}}
{{- define "tilecast.releaseLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: release
app.kubernetes.io/part-of: tilecast
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Of the pages. The operator's Deployment and Service select by the chart's name, so these have another one. */}}
{{- define "tilecast.webSelectorLabels" -}}
app.kubernetes.io/name: {{ printf "%s-web" (include "tilecast.name" . | trunc 59 | trimSuffix "-") }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tilecast.webLabels" -}}
{{ include "tilecast.webSelectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: web
app.kubernetes.io/part-of: tilecast
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "tilecast.releaseHook" -}}
helm.sh/hook: {{ include "tilecast.releaseAt" . }}
helm.sh/hook-weight: "-5"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end -}}

{{- define "tilecast.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tilecast.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tilecast.image" -}}
{{- with .Values.image }}
image: "{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}"
{{- end }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* Of pods. OpenShift gives every namespace users and groups of its own, and refuses the image's. */}}
{{- define "tilecast.podSecurity" -}}
{{- $kept := dict -}}
{{- range $key, $value := .Values.podSecurityContext -}}
{{- if not (and (eq (toString $value) "65532") ($.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}
{{- $_ := set $kept $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{- define "tilecast.containerSecurity" -}}
{{- toYaml .Values.securityContext -}}
{{- end -}}

{{/* Replicas on two nodes, where there are two. */}}
{{- define "tilecast.apart" -}}
preferredDuringSchedulingIgnoredDuringExecution:
  - weight: 100
    podAffinityTerm:
      topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "tilecast.selectorLabels" . | nindent 10 }}
          app.kubernetes.io/component: operator
{{- end -}}

{{/* Whether a source that is "auto", true or false is read: auto follows what the cluster serves. */}}
{{- define "tilecast.readKueue" -}}
{{- $has := or (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2") (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1") -}}
{{- if eq (toString .Values.capacity.readKueue) "auto" }}{{ $has }}{{ else }}{{ .Values.capacity.readKueue }}{{ end }}
{{- end }}

{{- define "tilecast.readResourceSlices" -}}
{{- $has := .Capabilities.APIVersions.Has "resource.k8s.io/v1" -}}
{{- if eq (toString .Values.discovery.readResourceSlices) "auto" }}{{ $has }}{{ else }}{{ .Values.discovery.readResourceSlices }}{{ end }}
{{- end }}

{{/* What a LabelSelector asks for, as a JSON list of its matchExpressions. */}}
{{- define "tilecast.requirements" -}}
{{- $all := list -}}
{{- range $key, $value := .matchLabels -}}
{{- $all = append $all (dict "key" $key "operator" "In" "values" (list $value)) -}}
{{- end -}}
{{- concat $all (.matchExpressions | default list) | toJson -}}
{{- end -}}

{{/* Whether some requirement of one selector excludes one of the other, so that no labels fit both; empty where none does. */}}
{{- define "tilecast.areDisjoint" -}}
{{- range $pair := list (list .one .other) (list .other .one) -}}
{{- range $a := first $pair -}}
{{- range $b := last $pair -}}
{{- if eq $a.key $b.key -}}
{{- $left := list -}}
{{- range $value := $a.values -}}
{{- $isThere := has $value ($b.values | default list) -}}
{{- if or (eq $b.operator "Exists") (and (eq $b.operator "In") $isThere) (and (eq $b.operator "NotIn") (not $isThere)) -}}
{{- $left = append $left $value -}}
{{- end -}}
{{- end -}}
{{- if or (and (eq $a.operator "In") (not $left)) (and (eq $a.operator "Exists") (eq $b.operator "DoesNotExist")) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
