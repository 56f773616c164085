"""One module per wire protocol, each translating between canonical parts and that protocol."""
