"""What stands on the wire: the custom resources, the advice in JSON, what calibration keeps, and the text of manifests.

`training_job` and `status` hold the two halves of a TrainingJob, `gpu_pool` a GPUPool, all on the models of `base`.
`crds` writes the resource definitions from them, `advice` the schema of `tilecast advise -o json`. `documents` reads
YAML and JSON, `edit` changes fields of a text. Everything here is pure: no client, no clock, no network.
"""
