module tilecast.dev/tools/karpenter

go 1.26.2

require sigs.k8s.io/karpenter v1.12.0
