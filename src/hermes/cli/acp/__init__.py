"""The Agent Client Protocol: editors use Hermes as their agent. A rendering of run events, over standard input and output."""
