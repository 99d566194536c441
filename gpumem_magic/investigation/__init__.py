"""The stepper: one checkpoint of a report after another, with the allocator's segments drawn to scale.

From the bottom: `memory_map` (what lay where at each checkpoint), `readings` (figures that somebody else published), `listing`
(the cell's own lines), `words` (what a step changed, in sentences), `steps` (all of it together, numbers and strings only),
`figure` and `page` (the picture that a saved notebook keeps), `widget` with its ``stepper.js`` and ``stepper.css``.
"""
