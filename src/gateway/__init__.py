"""Names under which other programs import the HTTP server; each module here is an alias."""
