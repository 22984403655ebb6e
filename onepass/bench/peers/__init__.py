"""Optional peers, one module an op: `PEERS` maps a name to a builder that says why it is not available here."""
