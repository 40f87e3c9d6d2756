"""Lines such as those of nanoGPT, build-nanogpt and modded-nanogpt: a step, its loss and its time."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "nanoGPT",
    (
        re.compile(
            rf"\biter(?:ation)?:? (?P<step>\d{{1,12}})\b.{{0,400}}?\btime:? {NUMBER} ?(?P<unit>ms|s)\b", re.ASCII
        ),
        re.compile(
            rf"\bstep:?\s{{1,20}}(?P<step>\d{{1,12}})\b.{{0,400}}?\b(?:dt|time):? {NUMBER} ?(?P<unit>ms|s)\b", re.ASCII
        ),
        re.compile(
            rf"\bstep:(?P<step>\d{{1,12}})/\d{{1,12}} .{{0,400}}?\bstep_time:{NUMBER}(?P<unit>ms|s)\b", re.ASCII
        ),
    ),
    word="t",
)
