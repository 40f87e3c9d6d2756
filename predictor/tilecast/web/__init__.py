"""A local web page on which a person tries jobs and pools: `tilecast web`.

`answers` turns the values of the page's form into the advice as HTML, without access to files. `page` has the form.
`server` serves both to the local machine, with searches in a separate process. Read `answers` first.
"""
