"""Events, run specs, messages, errors, ids and limits: what every other package uses."""
