"""Progress bars of tqdm, as Transformers and Lightning write them. The bar that ran longest is used."""

import re

from tilecast.logs.text import NUMBER, TextFormat

FORMAT = TextFormat(
    "tqdm",
    (
        re.compile(
            rf"(?P<step>\d{{1,12}})/(?P<series>\d{{1,12}}) \[[^\[\],]{{0,60}},\s{{0,9}}{NUMBER}(?P<unit>s/it|it/s)",
            re.ASCII,
        ),
    ),
    word="it",
)
