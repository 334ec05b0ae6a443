"""The report of one GPU: a module a part, and what runs them and makes the page of them."""
