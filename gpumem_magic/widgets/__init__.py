"""What moves in a notebook: the watch, live while a cell runs. Each widget is a Python model and a ``.js``/``.css`` file
beside it.

From the bottom: `columns` (what a row of a sample means), `ring` (rows that never outgrow their room), `live` (categories, as
far as the recording under way knows them), `observer` (one sample), `sampler` (the thread), `samples` (what is left afterwards),
`fronts` (widget, picture, line or summary), `watch` (ties them together), `engines` (one chart of watches elsewhere).
"""
