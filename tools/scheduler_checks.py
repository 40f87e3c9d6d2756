"""Check dialects of Ray and SkyPilot with these programs' own code; a program of the environment of `schedulers.py`.

    python scheduler_checks.py < request.json

The request has `ray` (texts of OPTIONS), `skypilot` (texts of tasks) and `products` (driver names of GPUs by our name).
The answer on standard output has the errors that Ray and SkyPilot find, and what they call each product. Nothing is
started and nothing is fetched.
"""

from __future__ import annotations

import ast
import json
import sys
from typing import Any


def main() -> None:
    """Read a request from standard input and write the answer to standard output."""
    import jsonschema  # type: ignore[import-untyped, unused-ignore]
    import ray  # type: ignore[import-not-found, unused-ignore]
    import sky  # type: ignore[import-not-found, unused-ignore]
    import yaml
    from ray._common.ray_option_utils import (  # type: ignore[import-not-found, unused-ignore]
        validate_actor_options,
    )
    from ray._private import label_utils  # type: ignore[import-not-found, unused-ignore]
    from ray._private.accelerators.nvidia_gpu import (  # type: ignore[import-not-found, unused-ignore]
        NvidiaGPUAcceleratorManager,
    )
    from sky.provision.kubernetes import utils as kubernetes  # type: ignore[import-not-found, unused-ignore]
    from sky.utils import schemas  # type: ignore[import-not-found, unused-ignore]

    request: dict[str, Any] = json.load(sys.stdin)
    errors = list[str]()
    for text in request["ray"]:
        options = ast.literal_eval(text.partition("OPTIONS = ")[2])
        try:
            validate_actor_options(options, in_options=True)
        except (ValueError, TypeError) as error:
            errors.append(f"ray: {error}")
        fault = label_utils.validate_fallback_strategy(options.get("fallback_strategy"))
        errors += [f"ray: {fault}"] if fault else []
    for text in request["skypilot"]:
        task = yaml.safe_load(text)
        resources = task["resources"]
        kinds = [*resources.get("ordered", ()), *resources.get("any_of", ())] or [resources]
        checks = [(task, schemas.get_task_schema())]
        checks += [(one, schemas.get_resources_schema()) for one in (resources, *kinds)]
        for value, schema in checks:
            found = jsonschema.validators.validator_for(schema)(schema).iter_errors(value)
            errors += [f"skypilot: {one.json_path}: {one.message}" for one in found]
    names = {
        name: {
            "ray": NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(product),
            "skypilot": kubernetes.GFDLabelFormatter.get_accelerator_from_label_value(product.replace(" ", "-")),
            "matches": kubernetes._accelerator_name_matches(
                request["skypilotNames"][name],
                [kubernetes.GFDLabelFormatter.get_accelerator_from_label_value(product.replace(" ", "-"))],
            ),
        }
        for name, product in request["products"].items()
    }
    versions = {"ray": ray.__version__, "skypilot": sky.__version__}
    json.dump({"errors": errors, "names": names, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
