"""The source itself: layers, choke points, imports, aliases, dependencies."""
