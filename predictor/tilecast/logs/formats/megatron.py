"""Logs of Megatron-LM and Megatron-Bridge, whose arguments give the GPUs and the plan."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "Megatron-LM",
    (
        re.compile(
            rf"iteration\s+(?P<step>\d{{1,12}})/\s*\d+ .*?elapsed time per iteration \((?P<unit>ms|s)\):\s*{NUMBER}",
            re.ASCII,
        ),
    ),
    word="elapsed time per iteration",
    argument=re.compile(r"(?:^|\s)(?P<name>[a-z_]{3,60}) \.{3,} (?P<value>\S{1,40})\s*$", re.ASCII),
    facts=(
        re.compile(
            r"using world size: (?P<gpus>\d+), .*?tensor-model-parallel size: (?P<tensor>\d+)"
            r"(?:, .*?pipeline-model-parallel size: (?P<pipeline>\d+))?",
            re.ASCII,
        ),
    ),
)
