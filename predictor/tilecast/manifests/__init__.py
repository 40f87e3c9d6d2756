"""Read what a Kubernetes job trains from its pods' command, arguments, environment and mounted ConfigMaps.

`pods` finds the pods with GPUs of each kind of job. `containers` turns a container into a launch line, with the files
that ConfigMaps mount. `processes` counts the processes that the line starts, and refuses contradictions with the pods.
`reading` combines these. All functions are pure and work on dictionaries. Nothing is executed or guessed: if the
manifest does not describe the job, it is refused with the reason.
"""

from tilecast.manifests.pods import (
    KINDS,
    find_training_runtime,
    is_finished,
    is_owned,
    is_readable_job,
    may_request_gpus,
)
from tilecast.manifests.reading import JobReading, list_config_maps, read_manifest

__all__ = [
    "KINDS",
    "JobReading",
    "find_training_runtime",
    "is_finished",
    "is_owned",
    "is_readable_job",
    "list_config_maps",
    "may_request_gpus",
    "read_manifest",
]  # fmt: skip
