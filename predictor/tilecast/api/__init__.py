"""Models and text of documents: custom resources, advice in JSON, calibrations and manifests.

`training_job` has the spec of a TrainingJob, `status` its status, and `gpu_pool` a GPUPool. All three build on `base`.
`crds` generates the resource definitions. `advice` generates the schema of `tilecast advise -o json`. `documents`
parses text, and `edit` changes fields in text. No module here opens a connection or reads a clock.
"""
