"""Why memory is what it is: causes, each found by a detector (`catalog` lists them) from evidence, with what to do about it."""
