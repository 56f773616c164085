"""The HTTP server and its settings; thin: it parses, hands a RunSpec to the engine, and renders the log."""
