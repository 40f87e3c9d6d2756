"""Documents: the custom resources, the advice in JSON, calibrations, and the YAML and JSON of manifests.

`training_job` has the spec of a TrainingJob, `status` its status, and `gpu_pool` a GPUPool; all build on the models of
`base`. `crds` generates the resource definitions from them, `advice` the schema of `tilecast advise -o json`.
`documents` reads text, `edit` changes fields in it. Everything here is pure: no client, no clock, no network.
"""
