"""Logs of DeepSpeed: of its pipeline engine, or else the time stamps of its throughput timer."""

import re

from tilecast.logs.text import NUMBER, TIME, TextFormat

FORMAT = TextFormat(
    "DeepSpeed",
    (
        re.compile(rf"steps: (?P<step>\d{{1,12}}) .{{0,400}}?iter time \(s\): {NUMBER}", re.ASCII),
        re.compile(
            rf"\[{TIME}\] \[INFO\] .{{0,400}}?/global_step=(?P<step>\d{{1,12}}), RunningAvgSamplesPerSec=", re.ASCII
        ),
        re.compile(rf"\[{TIME}\] \[INFO\] .{{0,400}}?\bstep=(?P<step>\d{{1,12}}), skipped=\d{{1,12}}, lr=", re.ASCII),
    ),
    word="step",
    argument=re.compile(r"\s(?P<name>[a-z_]{3,60}) \.{3,80} (?P<value>\S{1,40})\s{0,9}$", re.ASCII),
)
