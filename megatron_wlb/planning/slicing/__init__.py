"""Documents in slices: where they are cut, and what memory has room for."""
