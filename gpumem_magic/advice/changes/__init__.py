"""The changes that are known, a file for each idea: a public function `(Evidence, CellDraft) -> Iterator[Proposal]`."""
