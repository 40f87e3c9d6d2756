"""Logs of NeMo 2, and the progress bars of NeMo 1."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "NeMo",
    (re.compile(rf"global_step[:=] ?(?P<step>\d{{1,12}}).{{0,1000}}?train_step_timing in s[:=] ?{NUMBER}", re.ASCII),),
    word="train_step_timing in s",
)
