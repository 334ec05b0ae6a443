"""Corpora on disk and the stream of documents that a run draws from them."""
