"""Why memory is what it is: a catalogue of causes, each found by a detector from evidence, with what to do about it."""
