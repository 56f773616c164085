"""One module per wire protocol; each only translates between our parts and that protocol."""
