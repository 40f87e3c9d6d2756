"""Logs of torchtitan. Their lines have no duration, so it is computed from the time stamps."""

import math
import re
from collections.abc import Mapping

from tilecast.logs.text import TIME, TextFormat

_LISTED = re.compile(r"Building \d-D device mesh with \[([^\]]{0,200})\], \[([\d, ]{0,200})\]", re.ASCII)
"""Pattern of the mesh in logs of version 0.1."""
_NAMED = re.compile(r"Building device mesh with parallelism: ((?:\w{1,40}=\d{1,7}(?:, )?){1,12})", re.ASCII)
"""Pattern of the mesh in logs of version 0.2."""
_COLUMNS: Mapping[str, str] = {"pp": "pipeline", "cp": "context", "tp": "tensor", "ep": "expert"}
_SPLITS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions whose sizes multiply to the number of GPUs. Expert ranks are ranks of other dimensions."""


def read_mesh(line: str) -> dict[str, object]:
    """Return the GPUs and plan columns in a line that describes the mesh. For other lines, return an empty mapping."""
    if match := _LISTED.search(line):
        names, counts = (re.findall(r"\w+", text, re.ASCII) for text in match.groups())
        sizes = {name: int(count[:7]) for name, count in zip(names, counts, strict=False)}
    elif match := _NAMED.search(line):
        sizes = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", match[1], re.ASCII)}
    else:
        return {}
    values: dict[str, object] = {column: sizes.get(name, 1) for name, column in _COLUMNS.items()}
    if sizes.get("dp_replicate", 1) == 1:
        values["zero_stage"] = 3 if sizes.get("dp_shard", 1) > 1 else 0
    return {**values, "gpus": math.prod(sizes.get(name, 1) for name in _SPLITS)}


FORMAT = TextFormat(
    "torchtitan",
    (re.compile(rf"{TIME}.{{0,400}}?\bstep:\s{{0,20}}(?P<step>\d{{1,12}})\s{{1,20}}loss:", re.ASCII),),
    word="step:",
    facts=(
        re.compile(r"\bCUDA capacity: (?P<gpu>[^,\n]{3,80}?) with [\d.]{1,12} ?GiB memory", re.ASCII),
        re.compile(r"\blocal batch size:? (?P<micro_batch>\d{1,9})", re.ASCII),
    ),
    read_facts=read_mesh,
)
