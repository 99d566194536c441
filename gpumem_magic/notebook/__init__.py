"""The notebook's face. `magics` has every magic with its flags, `flags` is the parser behind them; what each does is beside it."""
