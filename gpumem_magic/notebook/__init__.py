"""The notebook's face: `magics` has every magic, ``magics.json`` their flags, `flags` the parser; what each does is beside it."""
