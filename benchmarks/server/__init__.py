"""The server under load, beside the bare engine and beside other servers."""
