"""The notebook's face: `magics` has every magic and its flags, `flags` the parser behind them; what each does is beside it."""
