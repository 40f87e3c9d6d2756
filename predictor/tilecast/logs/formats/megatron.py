"""Logs of Megatron-LM and Megatron-Bridge. Their arguments give the GPUs and the plan."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "Megatron-LM",
    (
        re.compile(
            rf"iteration\s{{1,20}}(?P<step>\d{{1,12}})/\s{{0,20}}\d{{1,12}} .{{0,400}}?"
            rf"elapsed time per iteration \((?P<unit>ms|s)\):\s{{0,20}}{NUMBER}",
            re.ASCII,
        ),
    ),
    word="elapsed time per iteration",
    argument=re.compile(r"(?:^|\s)(?P<name>[a-z_]{3,60}) \.{3,80} (?P<value>\S{1,40})\s{0,9}$", re.ASCII),
    facts=(
        re.compile(
            r"using world size: (?P<gpus>\d{1,9}), .{0,400}?tensor-model-parallel size: (?P<tensor>\d{1,9})"
            r"(?:, .{0,400}?pipeline-model-parallel size: (?P<pipeline>\d{1,9}))?",
            re.ASCII,
        ),
    ),
)
