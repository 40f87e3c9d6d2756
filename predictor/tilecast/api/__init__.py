"""Documents: the custom resources, the advice in JSON, calibrations, and the YAML and JSON of manifests.

`training_job` and `status` hold the two halves of a TrainingJob, `gpu_pool` a GPUPool, all on the models of `base`.
`crds` writes the resource definitions from them, `advice` the schema of `tilecast advise -o json`. `documents` reads
text, `edit` changes fields in it. Everything here is pure: no client, no clock, no network.
"""
