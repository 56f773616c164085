"""Names under which other programs import parts of the command line; each module here is an alias."""
