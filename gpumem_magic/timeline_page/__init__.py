"""A recording as a timeline: every allocation, stacked over time by category, in one page that needs no network.

From the bottom: `source` (a recording's numbers, from a file or a measured cell), `data` (those as the page wants them),
``model.js``, ``machine.js``, ``draw.js``, ``lists.js``, ``panels.js``, ``page.js`` and ``page.css`` (the page), `page` (ties
them into one document), `figure` (the same as a still picture), `view` (what a user holds).
"""
