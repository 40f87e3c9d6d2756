{{/* What lets jobs go that wait for Tilecast: before an uninstall, and while the operator is down. */}}

{{- define "tilecast.releaseRules" -}}
# Every job that waits for us, in any namespace.
{{ include "tilecast.jobRules" "[get, list, patch]" }}
{{- if .Values.shard.namespaceSelector }}
# Their labels say whose jobs are this shard's.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list]
{{- end }}
{{- end -}}

{{/* Pod spec of the command; takes root, account, arguments and resources. */}}
{{- define "tilecast.releasePod" -}}
{{- $arguments := .arguments -}}
{{- with .root.Values.shard.namespaceSelector }}
{{- $arguments = append $arguments (printf "--namespace-selector=%s" (toJson .)) }}
{{- end -}}
restartPolicy: Never
serviceAccountName: {{ .root.Values.rbac.create | ternary .account (include "tilecast.serviceAccountName" .root) }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  {{- include "tilecast.podSecurity" .root | nindent 2 }}
containers:
  - name: release
    {{- include "tilecast.image" .root | nindent 4 }}
    command: [python3, -m, tilecast_operator.release]
    {{- with $arguments }}
    args: {{ toJson . }}
    {{- end }}
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- include "tilecast.containerSecurity" .root | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
volumes:
  - name: tmp
    emptyDir:
      sizeLimit: 64Mi
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Whether jobs are let go while the operator is down: where some may wait for it, unless that is switched off. */}}
{{- define "tilecast.releasesWhenDown" -}}
{{- if and .Values.jobs.releaseWhenDown.enabled .Values.jobs.enabled (or .Values.jobs.place .Values.jobs.gate) -}}
true
{{- end -}}
{{- end -}}
