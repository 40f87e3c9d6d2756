"""Progress bars of torchtune's recipes, `1|52|Loss: 1.23: 5%|… | 52/1000 [00:31<09:24, 1.67it/s]`."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "torchtune",
    (
        re.compile(
            rf"\b\d{{1,12}}\|(?P<step>\d{{1,12}})\|Loss: (?:[^|]{{0,400}}\|){{1,3}} {{0,9}}\d{{1,12}}/\d{{1,12}} "
            rf"\[[^\[\],]{{0,60}},\s{{0,9}}{NUMBER}(?P<unit>s/it|it/s)",
            re.ASCII,
        ),
    ),
    word="|Loss: ",
)
