"""The experiments of papers, and the pages on them."""
