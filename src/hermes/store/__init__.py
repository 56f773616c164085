"""Where state is kept: one interface, and one module for each place it can live."""
