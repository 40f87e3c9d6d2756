"""Logs of MaxText."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "MaxText",
    (re.compile(rf"completed step: (?P<step>\d{{1,12}}), seconds: {NUMBER}", re.ASCII),),
    word="completed step:",
    facts=(re.compile(r"\bNum_devices: (?P<gpus>\d{1,9})\b", re.ASCII),),
)
