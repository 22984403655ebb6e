"""The ops, one folder each; `onepass.dispatch` picks the backend that runs them."""
