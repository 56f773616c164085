"""The agent core, driven through its engine and its façade against a provider on real sockets."""
